"""Work: the work tiles of a CTA and their order, the key blocks that each visits, and the tiles to replay."""

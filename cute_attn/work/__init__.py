"""Work: which work tiles a CTA takes, in which order, which key blocks each visits, and what is computed again."""

"""Rows: where row j of sequence b lies in global memory, and how tiles of rows come to shared memory."""

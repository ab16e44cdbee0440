"""Rows: where row j of sequence b is in global memory, and how tiles of rows are loaded to shared memory."""

"""The documents, and the scripts that make their generated parts."""

"""The Ampere forward with its forward-mode derivative."""

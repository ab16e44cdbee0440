"""The Hopper forward with its forward-mode derivative."""

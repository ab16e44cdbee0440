"""Eight levels from a scalar loop to the shipped Hopper forward; ``python -m tour`` lists them."""

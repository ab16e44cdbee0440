"""Eight levels from a scalar loop to the shipped Hopper forward, two of the backward; ``python -m tour`` lists them."""


def name_of(level: int) -> str:
    """The ``kernel`` argument of ``attention`` for a level: its generation and the variant's name."""
    arch = "sm80" if level < 5 or level == 9 else "sm90"
    return arch if level == 8 else f"{arch}:tour{level}"

"""Random calls of every door against a definition that shares no code with the package.

    python -m tests.fuzz --cases 1000 --seed 1 --emulated 20

A call is right, in values and gradients, or refused in one sentence: there is no third outcome. ``grammar`` draws
functions of scores, ``case`` everything else, ``doors`` makes the call, ``oracle`` says what is right, and ``judge``
compares. A failure is printed as the smallest ``Case(...)`` that still fails.
"""

"""Outputs: where results go: log-sum-exps, O, additions to dQ."""

"""Outputs: LSE, and dQ accumulation in fp32 with its order in memory."""

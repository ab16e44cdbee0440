"""Outputs: stores of O and LSE, partial results, and accumulation of dQ in fp32."""

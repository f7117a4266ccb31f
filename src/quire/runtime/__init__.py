"""Makes plans from index arrays, and runs them on tensors."""

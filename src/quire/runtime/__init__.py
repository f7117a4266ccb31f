"""Makes plans and runs them: from index arrays and tensors to launches."""

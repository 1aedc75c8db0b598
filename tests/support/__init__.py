"""What tests share: cases, oracles, budgets, tables."""

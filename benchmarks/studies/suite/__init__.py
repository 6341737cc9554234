"""Ten tasks in five families, on which recipes are chosen and peers are at their best."""

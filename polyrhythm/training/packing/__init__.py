"""Groups packed into rows: layout, attention over it, scores of its tokens."""

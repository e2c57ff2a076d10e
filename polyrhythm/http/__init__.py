"""One server base and one client base: tokens, limits, deadlines, errors and life cycle of everything that speaks HTTP here."""

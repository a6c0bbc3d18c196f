"""Tables of performance figures checked by arithmetic: what cannot be, row by row."""

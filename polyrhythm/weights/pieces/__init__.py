"""The bytes of a snapshot: `layout` says where each tensor is, `writing` and `reading` move the rows that a process holds."""

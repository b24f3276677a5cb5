"""Where a namespace keeps its messages: SQLite on disk, or memory, under one contract."""

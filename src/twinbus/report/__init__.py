"""The page that a person looks at: what the pipeline found in a ledger, as one file that needs nothing else (D4)."""

"""Rules of subscriptions: which messages of its topic a subscription takes, and how its copies are changed.

A rule has a filter and perhaps an action. Both are texts in the service's SQL-like language, or a correlation filter.
`grammar` parses a text, `compiler` makes functions of conditions and expressions, `actions` of SET and REMOVE
statements. `values` has the types of the language, `message_view` presents a message to it. `ruleset` runs the rules
of one subscription. Only `grammar`, `compiler` and `actions` need the parser (lark); they are loaded with the first
SQL rule.
"""

"""Rules of subscriptions: which messages of a topic a subscription stores, and how the rules change the copies.

A rule has a filter, and may have an action. An action and a SQL filter are texts in the service's SQL-like language; a
correlation filter is a set of property values.

    grammar        parses a text
    compiler       makes Python functions from conditions and expressions
    actions        makes Python functions from SET and REMOVE statements
    values         the types of the language
    message_view   the properties of a message, for the functions
    ruleset        runs all rules of one subscription

Only `grammar`, `compiler` and `actions` need the parser (lark). They are loaded with the first SQL rule.
"""

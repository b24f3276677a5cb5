"""Rules of subscriptions: which messages of its topic a subscription takes, and what is changed in its copies. Pure."""

"""The engine of a namespace: decides what happens to messages. Pure: no I/O, no clock, no randomness.

Theory of operation. An entity (queue, topic, subscription) is a state machine. `entity.advance(event, now)` changes the
state in memory and returns an `EngineDecision`: writes for the store, and effects for the network side. The runtime
commits the writes and carries out the effects after that, so nothing is acknowledged that is not on disk.

A queue of millions does not fit in memory. The engine keeps counters, locks, receivers, and the front of each lane
(`read_ahead`). If a decision needs other rows, it yields a `StoreRead` and is resumed with the answer; it reads before
it writes. Until the decision is complete, the runtime gives no other event to the same root entity: a queue, or a
topic with its subscriptions. A forward or a transaction holds several root entities.

Everything that happens by itself (expiry, locks, scheduled messages, idle deletion) is bound to one timer for each
root entity, `next_timer`. The runtime sends the event `EntityTimerFired` then.

Modules for the rest of the namespace (a test checks that it imports no others):

    registry                 the entities by path: find, create, update, delete
    queue, topic             the entities; a subscription is in `topic`
    forwarding, transactions decisions over several entities
    events, effects          what goes in, what comes out
    storage_protocol         rows, reads and writes: the language of the store
    descriptions             settings of entities and rules
    entity_properties        the names of all settings in every format
    validation, limits       checks of settings; figures of the service
    rules.values             types of the rule language

Inner modules: `send_target` (send side of queue and topic) with `send_checks` and `duplicate_detection`;
`receive_state` (data of the receive side) with `receiving`, `delivery`, `session_assignment`, `settlement`, `queries`,
`read_ahead`, `deadline_heap`; `lifecycle` (what every entity has); `description_json` (records of the store); `rules`.
"""

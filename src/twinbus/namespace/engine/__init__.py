"""The engine of a namespace: decides what happens to messages. Pure: no I/O, no clock, no randomness.

Theory of operation. An entity (queue, topic, subscription) is a state machine. `entity.advance(event, now)` changes the
state in memory and returns an `EngineDecision`: writes for the store, and effects for the network side. The runtime
commits the writes first and then carries out the effects, so a client never gets an acknowledgement of something that
is not on disk.

A queue may hold millions of messages, which do not fit in memory. The memory holds counters, locks, receivers, and the
first rows of each lane (`read_ahead`). If a decision needs other rows, the decision yields a `StoreRead` and is resumed
with the answer. Every decision reads before it writes. Until a decision is complete, the runtime gives no other event
to the same root entity: a queue, or a topic with its subscriptions. For a forward or a transaction this applies to
several root entities.

Some changes are caused by time and not by a request: expiry of messages and locks, scheduled messages, deletion of idle
entities. Each root entity has one timer for all of them. At the instant `next_timer`, the runtime sends the event
`EntityTimerFired` to the entity.

Modules that the rest of the namespace may import (a test checks that the rest imports no other module of the engine):

    registry                 the entities by path: find, create, update, delete
    queue, topic             the entities; a subscription is in `topic`
    forwarding, transactions decisions over several entities
    events, effects          the input and the output of a decision
    storage_protocol         rows, reads and writes: the data that engine and store exchange
    descriptions             settings of entities and rules
    entity_properties        the names of all settings in every format
    validation, limits       checks of settings; numeric limits of the service
    rules.values             types of the rule language

Inner modules: `send_target` (send side of queue and topic) with `send_checks` and `duplicate_detection`;
`receive_state` (data of the receive side) with `receiving`, `delivery`, `session_assignment`, `settlement`, `queries`,
`read_ahead`, `deadline_heap`; `lifecycle` (base class of all entities); `description_json` (records of the store);
`rules`.
"""

"""Programs in the idioms of azure-servicebus' own samples. Each makes its client, uses it, and returns what it saw.

`test_sdk_idioms` runs the text of each program with an SDK client and with a pair, as it is and, for the sync SDK,
without `async` and `await`. So a program names nothing that only one of the two SDKs has.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from azure.servicebus import NEXT_AVAILABLE_SESSION, ServiceBusMessage, ServiceBusReceiveMode, ServiceBusSubQueue
from azure.servicebus.aio import AutoLockRenewer
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageHeader, AmqpMessageProperties
from azure.servicebus.exceptions import OperationTimeoutError

from tests.sdk.installed import is_since

Make = Callable[..., Any]


class Entities(NamedTuple):
    """The entities of one run of one program. No other run uses them."""

    queue: str
    session_queue: str
    topic: str
    subscription: str
    session_subscription: str


def text_of(message: Any) -> str:
    return b"".join(message.body).decode()


# --- sending ---------------------------------------------------------------------------------------------------------


async def send_queue(make: Make, entities: Entities) -> object:
    client = make()
    async with client:
        sender = client.get_queue_sender(queue_name=entities.queue)
        async with sender:
            await sender.send_messages(ServiceBusMessage("single"))
            await sender.send_messages([ServiceBusMessage(f"in a list {number}") for number in range(5)])
            batch = await sender.create_message_batch()
            for number in range(5):
                batch.add_message(ServiceBusMessage(f"in a batch {number}"))
            await sender.send_messages(batch)
        async with client.get_queue_receiver(queue_name=entities.queue) as receiver:
            return [text_of(one) for one in await receiver.peek_messages(max_message_count=20)]


async def send_topic_and_receive_subscription(make: Make, entities: Entities) -> object:
    client = make()
    async with client:
        sender = client.get_topic_sender(topic_name=entities.topic)
        async with sender:
            await sender.send_messages([ServiceBusMessage("one", subject="a"), ServiceBusMessage("two", subject="b")])
        receiver = client.get_subscription_receiver(
            topic_name=entities.topic, subscription_name=entities.subscription, max_wait_time=1
        )
        found = []
        async with receiver:
            async for message in receiver:
                found.append((text_of(message), message.subject))
                await receiver.complete_message(message)
        return found


async def senders_and_receivers_made_before_the_client_is_entered(make: Make, entities: Entities) -> object:
    client = make()
    sender = client.get_queue_sender(entities.queue)
    receiver = client.get_queue_receiver(entities.queue, max_wait_time=5)
    async with client, sender, receiver:
        await sender.send_messages(ServiceBusMessage("x"))
        received = await receiver.receive_messages()
        await receiver.complete_message(received[0])
        return [text_of(one) for one in received]


async def a_client_that_is_never_entered(make: Make, entities: Entities) -> object:
    client = make()
    async with client.get_queue_sender(entities.queue) as sender:
        await sender.send_messages(ServiceBusMessage("x"))
    receiver = client.get_queue_receiver(entities.queue, receive_mode=ServiceBusReceiveMode.RECEIVE_AND_DELETE)
    received = await receiver.receive_messages(max_wait_time=5)
    await receiver.close()
    await client.close()
    await client.close()
    return [text_of(one) for one in received]


async def options_of_clients_and_handlers(make: Make, entities: Entities) -> object:
    client = make(retry_total=5, retry_mode="fixed", logging_enable=False, user_agent="sample")
    async with client:
        sender = client.get_queue_sender(entities.queue, client_identifier="a-sender", socket_timeout=5)
        receiver = client.get_queue_receiver(entities.queue, client_identifier="a-receiver", prefetch_count=3)
        async with sender, receiver:
            await sender.send_messages(ServiceBusMessage("x"), timeout=10)
            received = await receiver.receive_messages(max_wait_time=5)
            await receiver.complete_message(received[0])
            names = (client.fully_qualified_namespace, sender.fully_qualified_namespace, sender.entity_name)
            return names, sender.client_identifier, receiver.client_identifier, receiver.entity_path


async def annotated_messages(make: Make, entities: Entities) -> object:
    client = make()
    async with client:
        sender = client.get_queue_sender(queue_name=entities.queue)
        receiver = client.get_queue_receiver(queue_name=entities.queue, max_wait_time=1)
        found = []
        async with sender, receiver:
            data = AmqpAnnotatedMessage(data_body=[b"aa", b"bb"], application_properties={"body_type": "data"})
            sequence = AmqpAnnotatedMessage(
                sequence_body=[b"message", 123.456, True], properties=AmqpMessageProperties(subject="sequence")
            )
            value = AmqpAnnotatedMessage(
                value_body={b"key": [-123, b"data", False]},
                header=AmqpMessageHeader(priority=10),
                annotations={"annotation_key": "value"},
            )
            for message in (data, sequence, value):
                await sender.send_messages(message)
            async for message in receiver:
                raw = message.raw_amqp_message
                body = raw.body if str(raw.body_type) == "value" else list(raw.body)
                found.append((str(raw.body_type), body, raw.application_properties, raw.header.priority))
                await receiver.complete_message(message)
        return found


async def schedule_and_cancel(make: Make, entities: Entities) -> object:
    client = make()
    async with client:
        seen = []
        for sender in (client.get_queue_sender(entities.queue), client.get_topic_sender(entities.topic)):
            async with sender:
                later = datetime.now(UTC) + timedelta(hours=1)
                one = await sender.schedule_messages(ServiceBusMessage("one"), later)
                many = await sender.schedule_messages([ServiceBusMessage("many") for _ in range(3)], later)
                seen.append((len(one), len(many), all(number > 0 for number in one + many)))
                await sender.cancel_scheduled_messages(one[0])
                await sender.cancel_scheduled_messages(many[:2])
        async with client.get_queue_receiver(entities.queue) as receiver:
            return seen, [text_of(message) for message in await receiver.peek_messages(10)]


# --- receiving -------------------------------------------------------------------------------------------------------


async def receive_settle_and_peek(make: Make, entities: Entities) -> object:
    client = make()
    async with client:
        async with client.get_queue_sender(entities.queue) as sender:
            await sender.send_messages([ServiceBusMessage(f"{number}") for number in range(4)])
        receiver = client.get_queue_receiver(queue_name=entities.queue)
        async with receiver:
            found: list[Any] = []
            while len(found) < 4:
                found += await receiver.receive_messages(max_message_count=4, max_wait_time=5)
            await receiver.complete_message(found[0])
            await receiver.abandon_message(found[1])
            await receiver.dead_letter_message(found[2], reason="ProcessingError", error_description="unknown")
            await receiver.defer_message(found[3])
            peeked = await receiver.peek_messages(max_message_count=10, sequence_number=1)
            return [(text_of(one), str(one.state), one.delivery_count) for one in peeked]


async def deferred_messages(make: Make, entities: Entities) -> object:
    client = make()
    async with client:
        async with client.get_queue_sender(entities.queue) as sender:
            await sender.send_messages([ServiceBusMessage("to defer") for _ in range(3)])
        async with client.get_queue_receiver(entities.queue) as receiver:
            numbers: list[int] = []
            while len(numbers) < 3:
                for message in await receiver.receive_messages(max_message_count=3, max_wait_time=5):
                    numbers.append(message.sequence_number)
                    await receiver.defer_message(message)
            found = await receiver.receive_deferred_messages(sequence_numbers=numbers)
            for message in found:
                await receiver.complete_message(message)
            return [text_of(one) for one in found], await receiver.peek_messages(sequence_number=1)


async def dead_letters_mended_by_a_client_that_is_never_entered(make: Make, entities: Entities) -> object:
    client = make()
    sender = client.get_queue_sender(queue_name=entities.queue)
    receiver = client.get_queue_receiver(queue_name=entities.queue)
    dead = client.get_queue_receiver(queue_name=entities.queue, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    async with sender:
        await sender.send_messages([ServiceBusMessage("bad"), ServiceBusMessage("bad too")])
    async with receiver:
        left = 2
        while left:
            for message in await receiver.receive_messages(max_message_count=2, max_wait_time=5):
                await receiver.dead_letter_message(message, reason="Bad")
                left -= 1
    mended: list[ServiceBusMessage] = []
    async with dead:
        while len(mended) < 2:
            for message in await dead.receive_messages(max_message_count=2, max_wait_time=5):
                mended.append(ServiceBusMessage(text_of(message).replace("bad", "good"), subject="mended"))
                await dead.complete_message(message)
    async with client.get_queue_sender(queue_name=entities.queue) as again:
        await again.send_messages(mended)
    async with client.get_queue_receiver(queue_name=entities.queue) as last:
        seen = [(text_of(one), one.subject) for one in await last.peek_messages(10)]
    await client.close()
    return seen


async def locks_renewed(make: Make, entities: Entities) -> object:
    client = make()
    async with client:
        async with client.get_queue_sender(entities.queue) as sender:
            await sender.send_messages(ServiceBusMessage("x"))
        renewer = AutoLockRenewer()
        async with client.get_queue_receiver(entities.queue, prefetch_count=2) as receiver:
            (message,) = await receiver.receive_messages(max_wait_time=5)
            renewer.register(receiver, message, max_lock_renewal_duration=100)
            before = message.locked_until_utc
            after = await receiver.renew_message_lock(message)
            await receiver.complete_message(message)
        await renewer.close()
        return after >= before


# --- sessions --------------------------------------------------------------------------------------------------------


async def sessions_sent_and_received(make: Make, entities: Entities) -> object:
    client = make()
    async with client:
        async with client.get_queue_sender(queue_name=entities.session_queue) as sender:
            await sender.send_messages([ServiceBusMessage(f"{number}", session_id="mine") for number in range(3)])
        receiver = client.get_queue_receiver(queue_name=entities.session_queue, session_id="mine")
        async with receiver:
            await receiver.session.set_state("START")
            found: list[Any] = []
            while len(found) < 3:
                found += await receiver.receive_messages(max_message_count=3, max_wait_time=5)
            for message in found:
                await receiver.complete_message(message)
                await receiver.session.renew_lock()
            return [(text_of(one), one.session_id) for one in found], await receiver.session.get_state()


async def a_pool_of_sessions_of_a_client_that_is_never_entered(make: Make, entities: Entities) -> object:
    client = make(retry_total=0)
    for session in ("a", "b"):
        async with client.get_queue_sender(entities.session_queue) as sender:
            await sender.send_messages([ServiceBusMessage(f"{number}", session_id=session) for number in range(3)])
    found = []
    while True:
        try:
            async with client.get_queue_receiver(
                entities.session_queue, max_wait_time=1, session_id=NEXT_AVAILABLE_SESSION
            ) as receiver:
                renewer = AutoLockRenewer()
                renewer.register(receiver, receiver.session)
                await receiver.session.set_state("OPEN")
                async for message in receiver:
                    found.append((message.session_id, text_of(message)))
                    await receiver.complete_message(message)
                await receiver.session.set_state(None)
                await renewer.close()
        except OperationTimeoutError:
            await client.close()
            return sorted(found)


async def sessions_listed(make: Make, entities: Entities) -> object:
    client = make()
    begun = datetime.now(UTC) - timedelta(minutes=1)
    async with client:
        for sender in (client.get_queue_sender(entities.session_queue), client.get_topic_sender(entities.topic)):
            async with sender:
                await sender.send_messages([ServiceBusMessage("x", session_id=name) for name in ("b", "a")])
        async with client.get_queue_receiver(entities.session_queue, session_id="a") as receiver:
            await receiver.session.set_state("seen")
        of_queue = client.list_queue_sessions(entities.session_queue)
        of_subscription = client.list_subscription_sessions(entities.topic, entities.session_subscription, timeout=10)
        updated = client.list_queue_sessions(entities.session_queue, state_updated_after=begun)
        return [sorted([one async for one in listed]) for listed in (of_queue, of_subscription, updated)]


async def a_client_that_is_entered_again(make: Make, entities: Entities) -> object:
    client, seen = make(), []
    for number in range(3):
        async with client:
            async with client.get_queue_sender(queue_name=entities.queue) as sender:
                await sender.send_messages(ServiceBusMessage(f"time {number}"))
            async with client.get_queue_receiver(queue_name=entities.queue, max_wait_time=5) as receiver:
                for message in await receiver.receive_messages():
                    await receiver.complete_message(message)
                    seen.append(text_of(message))
    return seen


PROGRAMS = (
    a_client_that_is_entered_again,
    send_queue,
    send_topic_and_receive_subscription,
    senders_and_receivers_made_before_the_client_is_entered,
    a_client_that_is_never_entered,
    options_of_clients_and_handlers,
    annotated_messages,
    schedule_and_cancel,
    receive_settle_and_peek,
    deferred_messages,
    dead_letters_mended_by_a_client_that_is_never_entered,
    locks_renewed,
    sessions_sent_and_received,
    a_pool_of_sessions_of_a_client_that_is_never_entered,
    *([sessions_listed] if is_since("7.15") else []),
)

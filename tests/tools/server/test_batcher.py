"""Callers get the answers to their own items, whoever asks at the same time."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jformer.errors import BrokenRunError
from jformer.tools.server.batcher import Batcher, BusyError
from jformer.tools.server.limits import Limits


class Model:
    """Doubles numbers, one at a time, keeps what was asked together, and fails at a word."""

    def __init__(self):
        self.batches = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self, items):
        self.batches.append(list(items))
        assert self.may_answer.wait(10)
        if "bad" in items:
            raise KeyError("bad")
        for at, item in enumerate(items):
            yield {at: 2 * item}


def gathered(model, ask, full=100, **limits):
    """Run a coroutine function that is given a batcher which runs."""

    async def run():
        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher(model, executor, full, Limits(**limits))
            task = asyncio.create_task(batcher.run())
            try:
                return await ask(batcher), batcher.waiting
            finally:
                model.may_answer.set()
                task.cancel()

    return asyncio.run(run())


def test_what_is_asked_at_the_same_time_is_answered_together_and_each_gets_its_own():
    async def ask(batcher):
        return await asyncio.gather(*(batcher.ask([i, 10 * i]) for i in range(5)))

    model = Model()
    assert gathered(model, ask) == ([[2 * i, 20 * i] for i in range(5)], 0)
    assert model.batches == [[0, 0, 1, 10, 2, 20, 3, 30, 4, 40]]


def test_no_batch_begins_with_more_than_is_gathered():
    async def ask(batcher):
        return await asyncio.gather(*(batcher.ask([i]) for i in range(40)))

    model = Model()
    assert gathered(model, ask, full=1)[0] == [[2 * i] for i in range(40)]
    assert [len(batch) for batch in model.batches] == [16, 16, 8]


def test_a_mistake_in_the_items_of_one_is_no_others():
    async def ask(batcher):
        return await asyncio.gather(*(batcher.ask([item]) for item in (1, "bad", 3)), return_exceptions=True)

    answers, waiting = gathered(Model(), ask)
    assert (answers[0], answers[2], waiting) == ([2], [6], 0)
    assert isinstance(answers[1], KeyError)


def test_more_items_than_may_wait_are_refused_and_the_others_answered():
    async def ask(batcher):
        first = asyncio.create_task(batcher.ask([1, 2]))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await batcher.ask([3, 4])
        return await batcher.ask([5]), await first

    assert gathered(Model(), ask, waiting=3) == (([10], [2, 4]), 0)


def test_who_does_not_wait_any_more_is_left_out():
    async def ask(batcher):
        model.may_answer.clear()
        first = asyncio.create_task(batcher.ask([1]))
        while not model.batches:
            await asyncio.sleep(0.01)
        gone, second = (asyncio.create_task(batcher.ask([item])) for item in (2, 3))
        await asyncio.sleep(0)
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        model.may_answer.set()
        return await first, await second

    model = Model()
    assert gathered(model, ask) == (([2], [6]), 0)
    assert model.batches == [[1], [3]]


def test_an_answer_is_given_before_the_rest_of_its_batch_is_there():
    class Slow(Model):
        def __call__(self, items):
            yield {0: "first"}
            assert self.may_answer.wait(10)
            yield {1: "second"}

    async def ask(batcher):
        model.may_answer.clear()
        first, second = (asyncio.create_task(batcher.ask([item])) for item in (1, 2))
        found = await asyncio.wait_for(first, 10), second.done(), batcher.waiting
        model.may_answer.set()
        return found, await second

    model = Slow()
    assert gathered(model, ask) == (((["first"], False, 1), ["second"]), 0)


def test_what_was_answered_before_a_mistake_is_not_asked_again():
    class Failing(Model):
        def __call__(self, items):
            self.batches.append(list(items))
            for at, item in enumerate(items):
                if item == "bad":
                    raise KeyError(item)
                yield {at: item}

    async def ask(batcher):
        asked = [[1, 2], [3, "bad"], [5, 6]]
        return await asyncio.gather(*map(batcher.ask, asked), return_exceptions=True)

    model = Failing()
    answers, waiting = gathered(model, ask)
    assert (answers[0], answers[2], waiting) == ([1, 2], [5, 6], 0)
    assert isinstance(answers[1], KeyError)
    assert model.batches == [[1, 2, 3, "bad", 5, 6], [3, "bad"], [5, 6]]


def test_a_broken_run_is_asked_once():
    class Broken(Model):
        def __call__(self, items):
            self.batches.append(items)
            raise BrokenRunError("its weights")

    async def ask(batcher):
        return await asyncio.gather(*(batcher.ask([item]) for item in range(8)), return_exceptions=True)

    model = Broken()
    answers, waiting = gathered(model, ask)
    assert ([type(answer) for answer in answers], waiting) == ([BrokenRunError] * 8, 0)
    assert len(model.batches) == 1


def test_a_mistake_among_many_is_found_in_few_calls():
    async def ask(batcher):
        items = [*range(40), "bad", *range(23)]
        return await asyncio.gather(*(batcher.ask([item]) for item in items), return_exceptions=True)

    model = Model()
    answers, _ = gathered(model, ask)
    assert [i for i, answer in enumerate(answers) if isinstance(answer, KeyError)] == [40]
    assert len(model.batches) == 13  # the whole, and two halves at each of six levels


def test_more_than_is_answered_in_time_at_the_pace_of_full_batches_is_refused():
    async def ask(batcher):
        for _ in range(3):
            await batcher.ask([1])  # a small batch tells nothing of the pace of full ones
        batcher._rates.extend([1.0, 10.0, 2.0])  # items a second, of which half the time for an answer is five
        first = asyncio.create_task(batcher.ask(list(range(60))))  # alone, so large a request is taken
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await batcher.ask([1])
        found = len(await first)
        async with asyncio.timeout(10):
            while len(batcher._rates) < 4:  # the pace is noted after the answers are sent
                await asyncio.sleep(0)
        return found, list(batcher._rates)

    found, rates = gathered(Model(), ask, full=50, answer_seconds=10.0)[0]
    assert (found, rates[:3], len(rates)) == (60, [1.0, 10.0, 2.0], 4)


def test_a_server_that_was_slow_learns_that_it_is_quick():
    async def ask(batcher):
        batcher._rates.extend([10.0] * 3)  # at which a batch has one item, where 8 are full
        for i in range(10):
            await batcher.ask([i])
        return max(batcher._rates)

    rate, _ = gathered(Model(), ask, full=8, answer_seconds=0.4)
    assert rate > 10

"""Any order of operations on a store, against the plain reference."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstrata.store.arena import OutOfFramesError
from kvstrata.types import PAGE_SIZE, Anchors, Plan, Tier
from tests.store.reference import check_content, feed, make_store


class StoreMachine(RuleBasedStateMachine):
    """Any order of operations keeps the books and the content."""

    def __init__(self) -> None:
        super().__init__()
        self.store = make_store(num_frames=700)
        self.next = 0

    def ids(self) -> list[int]:
        return [s.id for s in self.store.sequences]

    @rule(tiers=st.lists(st.sampled_from([Tier.EVICTED, Tier.INT2, Tier.INT3, Tier.INT4, Tier.BF16]), max_size=4))
    def add(self, tiers: list[Tier]) -> None:
        if len(self.ids()) < 4:
            self.store.add_sequence(Plan(tuple(tiers), Tier.INT3))

    @precondition(lambda self: self.ids())
    @rule(data=st.data(), n=st.integers(1, 150), fresh=st.booleans(), commit=st.booleans())
    def extend(self, data: st.DataObject, n: int, fresh: bool, commit: bool) -> None:
        i = data.draw(st.sampled_from(self.ids()))
        start = 10_000 * self.next if fresh else self.store.sequence(i).num_tokens
        self.next += fresh
        try:
            feed(self.store, [i], [list(range(start, start + n))], commit=commit)
        except OutOfFramesError as error:
            assert error.asked > error.free

    @precondition(lambda self: self.ids())
    @rule(
        data=st.data(),
        tier=st.sampled_from([Tier.INT2, Tier.INT3, Tier.INT4, Tier.BF16]),
        first=st.sampled_from([Tier.EVICTED, Tier.INT2, Tier.BF16]),
        dead=st.dictionaries(st.integers(0, 6), st.integers(0, 2**32 - 1), max_size=2),
        anchors=st.none()
        | st.builds(Anchors, st.integers(0, 70), st.sampled_from([Tier.BF16, Tier.INT8]), refresh=st.sampled_from([0, 16])),
    )
    def plan(self, data: st.DataObject, tier: Tier, first: Tier, dead: dict[int, int], anchors: Anchors | None) -> None:
        try:
            self.store.set_plan(data.draw(st.sampled_from(self.ids())), Plan((first,), tier, dead, anchors))
        except OutOfFramesError as error:
            assert error.asked > error.free

    @precondition(lambda self: self.ids())
    @rule(data=st.data(), keep=st.floats(0, 1))
    def crop(self, data: st.DataObject, keep: float) -> None:
        i = data.draw(st.sampled_from(self.ids()))
        s = self.store.sequence(i)
        try:
            self.store.crop(i, int(keep * s.num_tokens) // PAGE_SIZE * PAGE_SIZE)
        except OutOfFramesError as error:
            assert error.asked > error.free

    @precondition(lambda self: 0 < len(self.ids()) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.store.fork(data.draw(st.sampled_from(self.ids())))

    @precondition(lambda self: self.ids())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.store.release(data.draw(st.sampled_from(self.ids())))

    @rule(n=st.integers(1, 400))
    def match(self, n: int) -> None:
        if len(self.ids()) < 4:
            i = self.store.add_sequence(Plan((), Tier.INT4))
            assert self.store.match_prefix(i, list(range(n))) % PAGE_SIZE == 0

    @invariant()
    def books_and_content(self) -> None:
        self.store.check_integrity()
        for i in self.ids():
            check_content(self.store, i)


StoreMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck))
TestStoreMachine = StoreMachine.TestCase

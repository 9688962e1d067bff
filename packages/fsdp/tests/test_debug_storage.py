"""`check_storage=True`: a read of a unit's released weights is an error that names the unit."""

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes

from lamina.buffers import StaleStorageError
from lamina.ddp import full_parameters
from lamina.fsdp import fully_shard, register_forward_method
from lamina_testing.toys import Block, OddNet, inputs


class Keeping(OddNet):
    """Keeps a view of a block's weight and uses it when the block has been released."""

    use = staticmethod(lambda weight: 0.0)
    kept = None
    seen = ()

    def forward(self, x):
        self.seen = (*modes(),)
        x = self.blocks[0](self.enter(x))
        x = self.blocks[2](self.blocks[1](x))
        return self.leave(x) * self.temperature + self.empty.sum() + self.use(self.kept[0])

    def encode(self, x):
        return self(x)


def build(use=None, **settings):
    torch.manual_seed(3)
    model = Keeping()
    model.kept = []
    model.blocks[0].register_forward_hook(
        lambda block, *_: model.kept.__setitem__(slice(None), [block.up.weight[:]])
    )
    if use is not None:
        model.use = use
    return fully_shard(model, fsdp_unit_modules=[Block], **settings)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "use",
    [lambda w: w.sum(), lambda w: w.square().mean(), lambda w: w.detach().t()[0].max()],
    ids=["not saved", "saved for backward", "a view of it"],
)
@pytest.mark.parametrize("settings", [{}, {"fsdp_double_buffer": True}], ids=["resize", "slots"])
def test_a_read_in_forward_names_the_released_unit(use, settings, ranks):
    model = build(use, check_storage=True, **settings)
    with pytest.raises(StaleStorageError, match=r"released.*'blocks\.0'"):
        model(inputs(model, ranks.rank))
    register_forward_method(model, "encode")
    with pytest.raises(StaleStorageError, match=r"released.*'blocks\.0'"):
        model.encode(inputs(model, ranks.rank))
    assert not modes(), "a check outlived its forward"


@pytest.mark.ranks(2)
def test_a_read_in_backward_names_the_released_unit(ranks):
    model = build(check_storage=True)
    unit = model.unit_of("blocks.1")

    def give_back_too_early(_, args, output):
        output.register_hook(lambda gradient: unit.reshard())

    model.blocks[1].up.register_forward_hook(give_back_too_early)
    loss = model(inputs(model, ranks.rank)).square().mean()
    with pytest.raises(StaleStorageError, match=r"'blocks\.1'.* is not live"):
        loss.backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("check", [False, True])
def test_it_changes_no_number_and_nothing_is_watched_unless_it_is_asked_for(check, ranks):
    model = build(lambda w: 0.0, **({"check_storage": True} if check else {}))
    plain = build(lambda w: 0.0)
    for one in (model, plain):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        one(inputs(one, ranks.rank)).square().mean().backward()
        optimizer.step()
    assert bool(model.seen) is check
    assert not plain.seen
    released = model.unit_of("blocks.1").gathered[0].full.untyped_storage()
    assert bool(released.nbytes()) is check
    if check:
        assert model.unit_of("blocks.1").gathered[0].full.isnan().all()
    found, wanted = full_parameters(model), full_parameters(plain)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.ranks(2)
def test_where_nothing_is_released_there_is_nothing_to_check(ranks):
    with pytest.raises(ValueError, match=r"check_storage=True.*zero_dp_strategy=3"):
        fully_shard(OddNet(), check_storage=True, zero_dp_strategy=2)

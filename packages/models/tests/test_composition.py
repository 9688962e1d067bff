import pytest, torch
from dataclasses import replace
from lamina.mesh import ParallelLayout, role_of
from lamina.models import *
from lamina.ddp import finalize_grads, full_parameters
from lamina.fsdp import fully_shard
C=TransformerConfig(vocab_size=64,hidden_size=32,num_layers=2,num_heads=4,num_kv_heads=2,ffn_size=48,max_sequence_length=32,qk_norm=True)
def batch(step):
    g=torch.Generator().manual_seed(step)
    t=torch.randint(0,64,(4,17),generator=g); return t[:,:-1],t[:,1:]
@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("strategy",[0,3])
@pytest.mark.parametrize("tied",[False,True])
@pytest.mark.parametrize("rec",["none","full","selective"])
def test_a(strategy,tied,rec):
    c=replace(C,tie_embeddings=tied,sequence_parallel=True)
    mesh=ParallelLayout(dp_shard=2,tp=2).build("cpu")
    whole=GPTModel(c,seed=1).double(); o=torch.optim.AdamW(whole.parameters(),1e-3)
    m=GPTModel(c,mesh,seed=1).double(); apply_recompute(m,rec)
    roles={n:role_of(p) for n,p in m.named_parameters()}
    opt=torch.optim.AdamW(m.parameters(),1e-3)
    m,opt=fully_shard(m,opt,device_mesh=mesh,zero_dp_strategy=strategy)
    dp=mesh.axis("dp")
    for s in range(3):
        t,y=batch(s)
        whole(t,y).backward(); o.step(); o.zero_grad()
        lt,ly=(x.chunk(2)[dp.rank] for x in (t,y))
        m(lt,ly).backward()
        finalize_grads(m,mesh)
        opt.step(); opt.zero_grad()
    full=full_parameters(m)
    for n,p in whole.named_parameters():
        f=full[n]
        r=roles[n]
        if r.tp_shard_dim is not None and f.shape!=p.shape:
            p=cut_weight(p,r.tp_shard_dim,mesh.axis("tp").rank,2,r.tp_blocks)
        torch.testing.assert_close(f,p.detach(),rtol=1e-9,atol=1e-9,msg=lambda mm:n+mm)

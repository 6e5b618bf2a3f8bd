import sys; sys.path[:0]=["src","benchmarks","tests"]
import torch
import kernels_products as kp
from kernels_products import microseconds, fp8, error
from firstlight.ops.op import REGISTRY
from firstlight.ops.experts import triton_grouped_kernels as gk, triton_sort_kernels as st
from firstlight.ops.linear import triton_block_fp8_kernel as bk
bf=torch.bfloat16
gu,dn=fp8(256,1024,2048),fp8(256,2048,512)
for T in (8,128,1024,8192):
    c=torch.rand(T,256,device="cuda").topk(8)[1].int()
    print("sort",T,round(microseconds([lambda:st.sorted_pairs(c,0,256,64,T*8//64+257)[0]]),2),flush=True)
for T in (16,128,8192):
    kp.CALLS=8
    x=torch.randn(T,2048,device="cuda",dtype=bf); r=[(torch.rand(T,8,device="cuda").softmax(-1).to(bf),torch.rand(T,256,device="cuda").topk(8)[1].int()) for _ in range(4)]
    y=gk.experts(x,*r[0],gu,dn,0)
    print("experts",T,round(microseconds([lambda w=w,c=c:gk.experts(x,w,c,gu,dn,0) for w,c in r]),2),error(y,REGISTRY["experts"].reference(x.float(),*r[0],gu,dn)),torch.equal(y,gk.experts(x,*r[0],gu,dn,0)),flush=True)
kp.CALLS=48
for n,k in ((12288,2048),(9216,2048),(2048,4096),(1024,2048)):
    ws=[fp8(n,k) for _ in range(8)]
    x=torch.randn(4,k,device="cuda",dtype=bf)
    print("thin",n,k,round(microseconds([lambda w=w:bk.product(x,w,None,bf) for w in ws]),2),flush=True)

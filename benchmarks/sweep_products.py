import sys, time, torch
sys.path[:0]=["src","tests"]
import firstlight.ops
from firstlight.ops.linear import triton_skinny_kernels as sk, triton_block_fp8_kernel as bk, torch_block_fp8
from firstlight.ops.linear.triton_quantise import quantised
from firstlight.ops.experts import triton_few_kernels as fk, triton_grouped_kernels as gk
from firstlight.ops.route import triton_fused_kernel as rk
from firstlight.ops.rms_norm import triton_fused_kernel as nk
from firstlight.ops.silu_mul import triton_fused_kernel as ak
from firstlight.quant import Packed, Format, unpack
from dataclasses import replace
WARM="--warm" in sys.argv
SECTIONS=[a for a in sys.argv[1:] if not a.startswith("-")]
dev="cuda"; bf=torch.bfloat16
def pack(n,k,e=None,copies=1):
    shape=(k,) ; lead=(n,) if e is None else (e,n)
    data=torch.randn(*lead,k,device=dev,dtype=bf).mul_(100).clamp_(-440,440).to(torch.float8_e4m3fn)
    sc=(torch.rand(*(lead[:-1]),-(-n//128),-(-k//128),device=dev)*1e-4+2e-4).to(bf)
    return Packed({"data":data,"scale":sc},Format("float8_e4m3fn",(128,128),"bfloat16"),(*lead,k))
def bench(fns,reps=20):
    if len(fns)>1 and not WARM: fns=fns*max(1,48//len(fns))
    if WARM:
        fns[0](); torch.cuda.synchronize(); return 0.
    for f in fns[:2]: f()
    torch.cuda.synchronize()
    s=torch.cuda.Stream()
    with torch.cuda.stream(s):
        fns[0]()
    s.synchronize()
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for f in fns: f()
    for _ in range(3): g.replay()
    ts=[]
    for _ in range(reps):
        a,b=torch.cuda.Event(True),torch.cuda.Event(True)
        a.record(); g.replay(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b))
    return sorted(ts)[len(ts)//2]*1e3/len(fns)
def err(a,b):
    a=a.float();b=b.float()
    return float(((a-b).pow(2).mean(-1).sqrt().max()/b.pow(2).mean().sqrt()))
def go(name,fns,ref=None,bytes_=0,flops=0,reps=20):
    try:
        e=err(fns[0](),ref) if ref is not None and not WARM else float("nan")
        t=bench(fns,reps)
        print(f"{name:62s} {t:9.2f} us err {e:.1e}  {bytes_/t/1e6 if t else 0:.2f} TB/s {flops/t/1e6 if t else 0:.0f} TF",flush=True)
    except Exception as ex:
        print(f"{name:62s} FAIL {type(ex).__name__} {str(ex)[:300]}",flush=True)
def section(f):
    if not SECTIONS or f.__name__ in SECTIONS: 
        torch.manual_seed(int(time.time())); f(); torch.cuda.empty_cache()
@section
def copy():
    a=torch.randn(2**30,device=dev,dtype=bf); b=torch.empty_like(a)
    go("copy",[lambda:torch.mul(a,1,out=b)],None,a.nbytes*2)
@section
def skinny():
    for n,k in ((12288,2048),(2048,4096),(1024,2048)):
        ws=[pack(n,k) for _ in range(8)]
        for T in (1,2,4,16,32):
            x=torch.randn(T,k,device=dev,dtype=bf); ref=x.float()@unpack(ws[0],torch.float32).t()
            if T<=4:
                for t in (dict(),)+((dict(block_n=4,block_k=2048,num_warps=4),dict(block_n=4,block_k=1024,num_warps=2)) if T>1 else ()):
                    go(f"skinny T{T} {n}x{k} {t}",[lambda w=w:sk.product(x,w,None,bf,**t) for w in ws],ref,n*k)
            if T>1:
                for t in (dict(),dict(block_n=128),dict(stages=8),dict(stages=4)) if T in (4,16) else (dict(),):
                    if T!=16 or t in (dict(),dict(block_n=128)): go(f"thin T{T} {n}x{k} {t}",[lambda w=w:bk.product(x,w,None,bf,**t) for w in ws],ref,n*k)
def expert_inputs(T,n=8):
    x=torch.randn(T,2048,device=dev,dtype=bf)
    r=[(torch.rand(T,8,device=dev).softmax(-1).to(bf),torch.rand(T,256,device=dev).topk(8).indices.int()) for _ in range(n)]
    return x,r
def expert_ref(x,w,c,gu,dn):
    if WARM: return None
    return firstlight.ops.REGISTRY["experts"].reference(x.float(),w,c,gu,dn)
def touched(r): return sum(len(c.unique()) for _,c in r)/len(r)*3*2**20
@section
def xfew():
    gu,dn=pack(1024,2048,256),pack(2048,512,256)
    for T in (1,2,4,8):
        x,r=expert_inputs(T); ref=expert_ref(x,*r[0],gu,dn); by=touched(r)
        for t in (dict(),dict(block_h=4),dict(block_i=8)):
            go(f"experts few T{T} {t}",[lambda w=w,c=c:fk.experts(x,w,c,gu,dn,0,**t) for w,c in r],ref,by)
@section
def xsmall():
    gu,dn=pack(1024,2048,256),pack(2048,512,256)
    for T in (4,8,16,32,128,512,1024):
        x,r=expert_inputs(T,4); ref=expert_ref(x,*r[0],gu,dn); by=touched(r)
        for t in (dict(),)+((dict(stages=2),dict(stages=4),dict(down_stages=4),dict(down_stages=2),dict(block_n=64)) if T in (16,128) else (dict(block_m=32,block_i=128,stages=3,down_stages=3),) if T>=512 else ()):
            go(f"grouped T{T} {t}",[lambda w=w,c=c:gk.experts(x,w,c,gu,dn,0,**t) for w,c in r],ref,by)
        go(f"sort T{T}",[lambda:gk.sorted_pairs(r[0][1],0,256,16,T*8)[0]]*8)
@section
def xlarge():
    gu,dn=pack(1024,2048,256),pack(2048,512,256); T=8192
    x,r=expert_inputs(T,1); ref=expert_ref(x,*r[0],gu,dn); (w,c),=r; fl=T*8*6*2048*512
    vs=[dict(),dict(n_tiles=1),dict(n_tiles=16),dict(n_tiles=8,down_stages=3),dict(stages=3),dict(block_n=256,down_warps=8,n_tiles=2,down_stages=3),dict(block_i=128,warps=8,stages=3),dict(block_m=128,warps=8,down_warps=8)]
    for t in vs:
        go(f"grouped T{T} {t}",[lambda:gk.experts(x,w,c,gu,dn,0,**t)],ref,0,fl,8)
    go(f"sort T{T}",[lambda:gk.sorted_pairs(c,0,256,64,T*8//64+256)[0]]*8)
    if not WARM:
        from torch.profiler import profile,ProfilerActivity
        for t in vs:
            with profile(activities=[ProfilerActivity.CUDA]) as p:
                for _ in range(3): gk.experts(x,w,c,gu,dn,0,**t)
                torch.cuda.synchronize()
            print(t,{e.key[:20]:round(e.device_time_total/e.count,1) for e in p.key_averages() if e.device_time_total>3})
@section
def large():
    n,k=12288,2048; ws=[pack(n,k) for _ in range(4)]
    for T in (64,128,256,512,8192):
        x=torch.randn(T,k,device=dev,dtype=bf); ref=None if WARM else x.float()@unpack(ws[0],torch.float32).t()
        go(f"torch block fp8 T{T}",[lambda w=w:torch_block_fp8.run(x,w) for w in ws],ref,n*k,2*T*n*k)
        for t in (dict(),dict(stages=3))+((dict(block_t=32,block_n=128),) if T<=128 else ()):
            go(f"triton block fp8 T{T} {t}",[lambda w=w:bk.product(x,w,None,bf,**t) for w in ws],ref,n*k,2*T*n*k)

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
    for n,k in ((12288,2048),(2048,4096),(9216,2048),(1024,2048)):
        ws=[pack(n,k) for _ in range(8)]; x=torch.randn(1,k,device=dev,dtype=bf)
        ref=x.float()@unpack(ws[0],torch.float32).t()
        for bn,bk_,nw in (((4,2048,4),(8,2048,4),(16,2048,4),(16,2048,8),(8,2048,2),(8,1024,2)) if k==2048 else ((4,2048,4),(4,4096,8),(8,4096,8),(2,4096,8),(8,2048,4))):
            go(f"skinny1 {n}x{k} bn{bn} bk{bk_} w{nw}",[lambda w=w:sk.product(x,w,None,bf,block_n=bn,block_k=bk_,num_warps=nw) for w in ws],ref,n*k)
    ws=[torch.randn(256,2048,device=dev,dtype=bf) for _ in range(8)]; x=torch.randn(1,2048,device=dev,dtype=bf)
    for bn,bk_,nw in ((1,2048,4),(2,2048,4),(2,1024,4)):
        go(f"skinny1 bf16 256x2048 bn{bn} bk{bk_} w{nw}",[lambda w=w:sk.product(x,w,None,bf,block_n=bn,block_k=bk_,num_warps=nw) for w in ws],x.float()@ws[0].float().t(),256*4096)
    w=torch.randn(248320,2048,device=dev,dtype=bf)
    for bn,bk_,nw in ((4,1024,4),(8,1024,4),(8,2048,8),(4,2048,8)):
        go(f"skinny1 bf16 head bn{bn} bk{bk_} w{nw}",[lambda:sk.product(x,w,None,bf,block_n=bn,block_k=bk_,num_warps=nw)]*2,x.float()@w.float().t(),w.nbytes)
@section
def few():
    for n,k in ((12288,2048),(2048,4096)):
        ws=[pack(n,k) for _ in range(8)]
        for T in (4,16):
            x=torch.randn(T,k,device=dev,dtype=bf); ref=x.float()@unpack(ws[0],torch.float32).t()
            go(f"quantise T{T}",[lambda:quantised(x,torch.float8_e4m3fn)]*8)
            for t in (dict(),dict(block_n=16),dict(block_n=64),dict(stages=6),dict(stages=3),dict(warps=2,stages=6),dict(block_n=16,warps=2,stages=6),dict(block_n=16,warps=1,stages=6)):
                if T==4 or not t: go(f"blockfp8 {n}x{k} T{T} {t}",[lambda w=w:bk.product(x,w,None,bf,**t) for w in ws],ref,n*k)
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
    for T in (1,4,8,16):
        x,r=expert_inputs(T); ref=expert_ref(x,*r[0],gu,dn); by=touched(r)
        for t in (dict(),dict(block_i=2),dict(block_i=8),dict(block_k=1024,num_warps=2),dict(block_h=2),dict(block_h=8),dict(block_h=8,down_warps=8),dict(block_h=4,down_warps=8)):
            go(f"experts few T{T} {t}",[lambda w=w,c=c:fk.experts(x,w,c,gu,dn,0,**t) for w,c in r],ref,by)
@section
def xsmall():
    gu,dn=pack(1024,2048,256),pack(2048,512,256)
    for T in (8,16,32,128,512):
        x,r=expert_inputs(T,4); ref=expert_ref(x,*r[0],gu,dn); by=touched(r)
        base=dict(block_m=16,block_i=128,warps=4,stages=3,block_n=128,down_warps=4,down_stages=3)
        for t in (dict(),dict(stages=2),dict(stages=4),dict(warps=8),dict(block_n=64),dict(down_stages=2),dict(down_stages=4),dict(down_warps=8),dict(block_m=32),dict(block_i=64,stages=4)):
            if T in (128,) or not t or (T==512 and 'block_m' in t): go(f"grouped T{T} {t}",[lambda w=w,c=c:gk.experts(x,w,c,gu,dn,0,**(base|t)) for w,c in r],ref,by)
        go(f"sort T{T}",[lambda:gk.sorted_pairs(r[0][1],0,256,16,T*8)[0]]*8)
@section
def xlarge():
    gu,dn=pack(1024,2048,256),pack(2048,512,256); T=8192
    x,r=expert_inputs(T,1); ref=expert_ref(x,*r[0],gu,dn); (w,c),=r; fl=T*8*6*2048*512
    m64=dict(block_m=64,block_i=64,warps=4,stages=3,block_n=128,down_warps=4,down_stages=3)
    vs=[m64]+[m64|v for v in (dict(stages=4),dict(stages=2),dict(down_stages=2),dict(down_stages=4),dict(block_n=64),dict(block_i=128,warps=8),dict(block_i=32))]+[dict(block_m=128,block_i=64,warps=8,stages=3,down_warps=8,down_stages=3,block_n=128),dict(block_m=128,block_i=64,warps=8,stages=2,down_warps=8,down_stages=2,block_n=128),dict(block_m=128,block_i=32,warps=4,stages=3,down_warps=4,down_stages=3,block_n=64)]
    for t in vs:
        go(f"grouped T{T} {t}",[lambda:gk.experts(x,w,c,gu,dn,0,**t)],ref,0,fl,8)
    go(f"sort T{T}",[lambda:gk.sorted_pairs(c,0,256,64,T*8//64+256)[0]]*8)
    if not WARM:
        from torch.profiler import profile,ProfilerActivity
        for t in vs:
            with profile(activities=[ProfilerActivity.CUDA]) as p:
                for _ in range(3): gk.experts(x,w,c,gu,dn,0,**t)
                torch.cuda.synchronize()
            for e in sorted(p.key_averages(),key=lambda e:-e.device_time_total)[:9]: print("   ",{k:v for k,v in t.items() if m64.get(k)!=v}, e.key[:40], round(e.device_time_total/e.count,1)) if e.device_time_total>5 else 0
@section
def large():
    n,k=12288,2048; ws=[pack(n,k) for _ in range(4)]
    for T in (64,256,1024,8192):
        x=torch.randn(T,k,device=dev,dtype=bf); ref=None if WARM else x.float()@unpack(ws[0],torch.float32).t()
        go(f"torch block fp8 T{T}",[lambda w=w:torch_block_fp8.run(x,w) for w in ws],ref,n*k,2*T*n*k)
        go(f"quantise T{T}",[lambda:quantised(x,torch.float8_e4m3fn)]*8)
        vs={64:(dict(),dict(block_n=64)),256:(dict(),dict(stages=3)),1024:(dict(block_t=64,warps=4),dict(block_t=64,warps=4,stages=3)),8192:(dict(block_t=64,warps=4,stages=4),dict(block_t=64,warps=4,stages=3),dict(block_t=64,warps=4,stages=3,together=16))}[T]
        for t in vs:
            go(f"triton block fp8 T{T} {t}",[lambda w=w:bk.product(x,w,None,bf,**t) for w in ws],ref,n*k,2*T*n*k)
@section
def small():
    for T in (1,128,8192):
        l=torch.randn(T,256,device=dev,dtype=bf); live=torch.tensor([T],device=dev)
        go(f"route T{T}",[lambda:rk.route(l,8,"softmax",True,None,1.0,live,bf)[0]]*24,None if WARM else firstlight.ops.REGISTRY["route"].reference(l,top_k=8,renormalise=True)[0])
        x=torch.randn(T,2048,device=dev,dtype=bf); y=torch.randn_like(x); wt=torch.randn(2048,device=dev,dtype=bf)
        go(f"add_rms_norm T{T}",[lambda:nk.add_rms_norm(x,y,wt,1e-6,True)[0]]*24,None if WARM else firstlight.ops.REGISTRY["add_rms_norm"].reference(x,y,wt,eps=1e-6,zero_centred=True)[0],T*2048*8)
        h=torch.randn(T,1024,device=dev,dtype=bf)
        go(f"silu_mul T{T}",[lambda:ak.silu_mul(h)]*24,None if WARM else firstlight.ops.REGISTRY["silu_mul"].reference(h),T*3072)
        v=torch.randn(T,32,128,device=dev,dtype=bf); gt=torch.randn_like(v); w2=torch.randn(128,device=dev)
        go(f"gated_rms_norm T{T}",[lambda:nk.gated_rms_norm(v,gt,w2,1e-6)]*24,None if WARM else firstlight.ops.REGISTRY["gated_rms_norm"].reference(v,gt,w2,eps=1e-6),T*4096*6)
    from firstlight.ops.sample import triton_split_kernels as ts
    from firstlight.ops.embedding import triton_rows_kernel as te
    for N in (1,128):
        l=torch.randn(N,248320,device=dev,dtype=bf); z=torch.full((N,),.7,device=dev); sd=torch.arange(N,device=dev); one=torch.ones(N,device=dev)
        for gr in (True,False):
            R=firstlight.ops.REGISTRY["sample"].reference(l,z,one,one,sd,sd,greedy=gr,filtered=False)
            print("sample equal",N,gr,(R==ts.sample(l,z,sd,sd,gr)).float().mean().item())
            go(f"sample N{N} greedy {gr}",[lambda:ts.sample(l,z,sd,sd,gr)]*8,None,l.nbytes)
        go(f"torch argmax {N}",[lambda:l.argmax(-1)]*8,None,l.nbytes)
    w=torch.randn(248320,2048,device=dev,dtype=bf); ids=torch.randint(0,248320,(8192,),device=dev)
    print("emb",torch.equal(te.rows(w,ids,0,bf),w[ids]))
    go("embedding 8192",[lambda:te.rows(w,ids,0,bf)]*8,None,8192*8192)

// Loads by TMA, and the mbarriers that count their bytes: PTX of sm_90 and every later architecture.

struct __align__(64) TensorMap {
  u64 opaque[16];
};

// True in one lane of a whole warp. The compiler knows that it is one, which saves the loop around each TMA that would
// serve lanes with operands of their own.
DEVICE bool elect() {
  u32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected;
}

DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nretry:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra retry;\n}" ::
          "r"(barrier),
      "r"(parity)
      : "memory");
}

DEVICE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<u64>(map)) : "memory");
}

// Of lines that leave L2 before others do.
DEVICE u64 evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

template <bool FIRST = false>
DEVICE void tma_load(u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z) {
  if constexpr (FIRST) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
        "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(evict_first())
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(destination),
        "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
  }
}

// Orders this thread's ordinary writes to shared memory before later TMA stores and wgmma that read them.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

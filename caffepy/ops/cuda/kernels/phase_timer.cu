// PhaseTimer on the device's own clock, by one thread: nobody waits for it, and the host reads what it wrote when it likes.

// clock = when the last mark ended, then nanoseconds of each part; `told` has the latter in the host's memory. What went
// by before a part below 0 does not count; the rest does so many times.
__global__ void mark(unsigned long long* clock, volatile unsigned long long* told, int part, int times) {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  if (part >= 0 && now > clock[0]) told[part] = clock[1 + part] += times * (now - clock[0]);
  clock[0] = now;
}

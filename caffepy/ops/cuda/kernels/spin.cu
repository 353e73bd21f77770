// Waits for a number of clock ticks, so that what is launched after it is queued up when the device gets there.

__global__ void spin(long long ticks) {
  const long long start = clock64();
  while (clock64() - start < ticks) {
  }
}

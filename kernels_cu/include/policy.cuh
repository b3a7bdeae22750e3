// what      The names by which the Hopper kernels of `gated` include the read order.
#include "read_order.cuh"

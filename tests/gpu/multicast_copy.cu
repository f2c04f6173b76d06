// Copies of tiles to shared memory without any product, as in multicast_copy.py, with a choice that Gluon does not
// offer: a shared tile is copied by program 0 of a cluster ("leader") or one half by each program ("halves").
//
//     nvcc -O3 -gencode arch=compute_90a,code=sm_90a -o multicast_copy tests/gpu/multicast_copy.cu
//     ./multicast_copy            # one line of JSON for each shape and way: microseconds, medians with a cold L2 cache
//
// One thread of a program does everything. Barriers of a stage: `full` counts the bytes that arrive in the program's
// shared memory; `empty` counts the programs of the cluster, each of which has read its own copy of the stage.

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                              \
    do {                                                                                         \
        cudaError_t error = (call);                                                              \
        if (error != cudaSuccess) {                                                              \
            printf("{\"failed\": \"%s:%d %s\"}\n", __FILE__, __LINE__, cudaGetErrorString(error)); \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

constexpr int kMaxStages = 16;

struct Work {
    int x_rows, w_rows;      // lines of 128 bytes that end up in one program's shared memory in a step
    int x_parts, w_parts;    // how many different tiles of each the programs of a cluster have: 1 is shared
    int x_issue, w_issue;    // a shared tile: 0 each program copies all of it, 1 the leader does, 2 each one half
    int total, tiles;        // tiles of a cluster in all; of a block
    int per_expert, steps, stages;
};

__device__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void wait(uint32_t barrier, int phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
        ::"r"(barrier), "r"(phase)
        : "memory");
}

__device__ void arrive(uint32_t barrier, int rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

__device__ void copy(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier, bool multicast) {
    if (multicast) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
            "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
            "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((uint16_t)3)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
            ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier)
            : "memory");
    }
}

// One operand's tile of `rows` lines: `first` is the cluster's first row; boxes of `map` have half of the lines.
__device__ void copy_tile(uint32_t to, const CUtensorMap* map, int rows, int parts, int issue, int column, int first,
                          uint32_t barrier, int rank) {
    const int half = rows / 2;
    if (parts > 1) first += rank * rows;
    if (parts > 1 || issue != 1 || rank == 0) {
        for (int i = 0; i < 2; i++) {
            if (parts > 1 || issue != 2 || i == rank)
                copy(to + i * half * 128, map, column, first + i * half, barrier, parts == 1 && issue > 0);
        }
    }
}

template <int CLUSTER>
__global__ void __launch_bounds__(32) copy_tiles(const __grid_constant__ CUtensorMap x_map,
                                                 const __grid_constant__ CUtensorMap w_map, Work work) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ __align__(8) uint64_t full[kMaxStages], empty[kMaxStages];
    int rank = 0;
    if (CLUSTER > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) {
        for (int i = 0; i < work.stages; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[i])));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&empty[i])), "r"(CLUSTER));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    const int program = blockIdx.x / CLUSTER, programs = gridDim.x / CLUSTER;
    const int stage_bytes = (work.x_rows + work.w_rows) * 128;
    const uint32_t base = (shared_address(memory) + 1023) / 1024 * 1024;
    const int count = program < work.total ? (work.total - program + programs - 1) / programs * work.steps : 0;
    if (threadIdx.x == 0) {
        for (int j = 0; j < count + work.stages - 1; j++) {
            if (j < count) {
                const int stage = j % work.stages, tile = program + j / work.steps * programs;
                const int block = tile / work.tiles, column = j % work.steps * 128;
                const uint32_t barrier = shared_address(&full[stage]), to = base + stage * stage_bytes;
                wait(shared_address(&empty[stage]), (j / work.stages & 1) ^ 1);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(stage_bytes)
                             : "memory");
                copy_tile(to + work.x_rows * 128, &w_map, work.w_rows, work.w_parts, work.w_issue, column,
                          (block / work.per_expert * work.tiles + tile % work.tiles) * work.w_rows * work.w_parts,
                          barrier, rank);
                copy_tile(to, &x_map, work.x_rows, work.x_parts, work.x_issue, column,
                          block * work.x_rows * work.x_parts, barrier, rank);
            }
            const int done = j - (work.stages - 1);
            if (done >= 0) {
                wait(shared_address(&full[done % work.stages]), done / work.stages & 1);
                for (int i = 0; i < CLUSTER; i++) arrive(shared_address(&empty[done % work.stages]), i);
            }
        }
    }
    __syncwarp();
    // Neither program ends while the other may still arrive at its barriers.
    if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                           const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

CUtensorMap describe(void* base, long rows, int columns, int box_rows) {
    static Encode encode = nullptr;
    if (!encode) {
        cudaDriverEntryPointQueryResult found;
        void* pointer = nullptr;
        CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found));
        encode = reinterpret_cast<Encode>(pointer);
    }
    CUtensorMap map;
    cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)columns};
    cuuint32_t box[2] = {128, (cuuint32_t)box_rows}, ones[2] = {1, 1};
    CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, base, sizes, strides, box, ones,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        printf("{\"failed\": \"cuTensorMapEncodeTiled %d\"}\n", (int)result);
        exit(1);
    }
    return map;
}

struct Way {
    const char* name;
    int cluster, x_parts, w_parts, x_issue, w_issue;
};

const Way kWays[] = {
    {"single", 1, 1, 1, 0, 0},         {"pair, nothing shared", 2, 1, 2, 0, 0}, {"x, leader", 2, 1, 2, 1, 0},
    {"x, halves", 2, 1, 2, 2, 0},      {"weights, leader", 2, 2, 1, 0, 1},      {"weights, halves", 2, 2, 1, 0, 2},
};

struct Shape {
    const char* name;
    int x_rows, w_rows, per_expert, tiles, experts, steps, stages;
};

const Shape kShapes[] = {
    {"e4m3: x of 128 tokens, 256 rows", 128, 256, 4, 22, 32, 22, 4},
    {"bfloat16 and 4 bits: x of 128 tokens, 256 rows", 128, 64, 4, 22, 32, 45, 8},
    {"bfloat16 and 4 bits: x of 64 tokens, 256 rows", 64, 64, 2, 22, 32, 45, 8},
    {"bfloat16 and 4 bits: x of 32 tokens, 128 rows", 32, 32, 2, 12, 128, 32, 16},
};

void launch(const Way& way, const Shape& shape, CUtensorMap x_map, CUtensorMap w_map, int processors) {
    Work work = {shape.x_rows, shape.w_rows, way.x_parts, way.w_parts, way.x_issue, way.w_issue, 0, 0, 0, 0, 0};
    work.per_expert = shape.per_expert / way.x_parts;
    work.tiles = shape.tiles / way.w_parts;
    work.total = shape.experts * work.per_expert * work.tiles;
    work.steps = shape.steps;
    work.stages = shape.stages;
    cudaLaunchConfig_t config = {};
    config.gridDim = processors / way.cluster * way.cluster;
    config.blockDim = 32;
    config.dynamicSmemBytes = (shape.x_rows + shape.w_rows) * 128 * shape.stages + 1024;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = way.cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    auto kernel = way.cluster > 1 ? copy_tiles<2> : copy_tiles<1>;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)config.dynamicSmemBytes));
    CHECK(cudaLaunchKernelEx(&config, kernel, x_map, w_map, work));
}

int main() {
    const int replays = 15, ways = sizeof(kWays) / sizeof(kWays[0]);
    const size_t flush_bytes = 256u << 20;
    int processors = 0;
    CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
    void* flush;
    CHECK(cudaMalloc(&flush, flush_bytes));
    for (const Shape& shape : kShapes) {
        const int columns = shape.steps * 128;
        const long x_rows = (long)shape.experts * shape.per_expert * shape.x_rows;
        const long w_rows = (long)shape.experts * shape.tiles * shape.w_rows;
        void *x, *w;
        CHECK(cudaMalloc(&x, x_rows * columns));
        CHECK(cudaMalloc(&w, w_rows * columns));
        CHECK(cudaMemset(x, 0, x_rows * columns));
        CHECK(cudaMemset(w, 0, w_rows * columns));
        CUtensorMap x_map = describe(x, x_rows, columns, shape.x_rows / 2);
        CUtensorMap w_map = describe(w, w_rows, columns, shape.w_rows / 2);
        std::vector<std::vector<float>> times(ways);
        cudaEvent_t begin, end;
        CHECK(cudaEventCreate(&begin));
        CHECK(cudaEventCreate(&end));
        for (int turn = 0; turn < replays + 2; turn++) {
            for (int i = 0; i < ways; i++) {
                const int which = (i + turn) % ways;
                CHECK(cudaMemsetAsync(flush, turn, flush_bytes));
                CHECK(cudaEventRecord(begin));
                launch(kWays[which], shape, x_map, w_map, processors);
                CHECK(cudaEventRecord(end));
                CHECK(cudaDeviceSynchronize());
                float milliseconds;
                CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
                if (turn >= 2) times[which].push_back(milliseconds * 1000);
            }
        }
        const double bytes = (double)shape.experts * shape.per_expert * shape.tiles * columns *
                             (shape.x_rows + shape.w_rows);
        for (int i = 0; i < ways; i++) {
            std::sort(times[i].begin(), times[i].end());
            const double us = times[i][replays / 2];
            printf("{\"part\": \"cuda copy\", \"shape\": \"%s\", \"way\": \"%s\", \"us\": %.1f, \"low\": %.1f, "
                   "\"high\": %.1f, \"terabytes_per_second\": %.2f}\n",
                   shape.name, kWays[i].name, us, times[i][replays / 4], times[i][replays * 3 / 4], bytes / us / 1e6);
            fflush(stdout);
        }
        CHECK(cudaFree(x));
        CHECK(cudaFree(w));
    }
    return 0;
}

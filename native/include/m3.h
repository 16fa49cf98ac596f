/* m3.h - the whole public C interface of the m3-gguf engine.
 *
 * Two objects: an m3_model (weights of one MiniMax-M3 shaped model, shareable between sessions) and an
 * m3_session (one paged cache with its sequences). Beside them a reader for GGUF files and the conversion of
 * rows between float32 and the storage types.
 *
 * Conventions
 *   - Shapes are written outermost first: [n_tokens, n_embd] has n_embd contiguous. GGUF writes the same
 *     tensor as ne = {n_embd, n_tokens}.
 *   - Every function that can fail returns an m3_status and fills a caller-owned m3_error (may be NULL) with
 *     one line that names the thing, what was expected and what was found. On failure out-pointers are set
 *     to NULL and nothing is left allocated; a session whose eval failed keeps the length it had before.
 *   - The engine never prints, exits, reads the environment or keeps mutable globals. m3_end_on_bus_error, which a
 *     program may ask for, is the exception.
 *   - Options structs start with struct_size = sizeof(the struct), which catches a library and a header that
 *     do not belong together. A zeroed field is valid unless said otherwise (for a cache type it is F32).
 *   - Files stay mapped while they are open. One that another program shortens meanwhile ends the process (SIGBUS, see
 *     m3_end_on_bus_error).
 *   - One thread at a time may use a session or bind weights to a model, with exceptions that any thread may call at
 *     any time: m3_session_cancel, m3_session_progress and their like of loading. Sessions of one model are
 * independent.
 *
 * The model: MiniMax-M3, sparse attention as in "MiniMax Sparse Attention" (arXiv 2606.13392). The file:
 * GGUF version 3, architecture "minimax-m3", as written by llama.cpp.
 */
#ifndef M3_H
#define M3_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The library is built with hidden visibility; what this header declares is what it exports. */
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* [declarations] The part down to [end of declarations] is free of macros and is read by cffi as it stands. */

#define M3_ABI_VERSION 10

/* Limits. A file or an option beyond them is refused by name. */
#define M3_MAX_LAYERS 1024
#define M3_MAX_HEADS 1024
#define M3_MAX_EXPERTS 4096
#define M3_MAX_DIM 1048576 /* n_embd, head_dim * n_head, feed-forward widths */
#define M3_MAX_HEAD_DIM 1024
#define M3_MAX_VOCAB 4194304
#define M3_MAX_TOP_K 1024
#define M3_MIN_BLOCK 16 /* block_size: a power of two from M3_MIN_BLOCK to M3_MAX_BLOCK */
#define M3_MAX_BLOCK 1024
#define M3_MAX_CONTEXT 16777216 /* tokens of one sequence */
#define M3_MAX_SEQUENCES 4096
#define M3_MAX_DIMS 4
#define M3_MAX_KEYS 65536
#define M3_MAX_TENSORS 65536
#define M3_MAX_FILES 4096    /* that one model is split into */
#define M3_MAX_PATCH_SIZE 64 /* pixels on a side of a patch of an image */
#define M3_MAX_PATCHES 65536 /* of one image or clip */
#define M3_MAX_IMAGES 4096   /* encoded together */
#define M3_FEW_THREADS 32    /* see m3_max_threads */

typedef enum m3_status {
  M3_OK = 0,
  M3_ERROR_ARGUMENT = 1,    /* an argument or option is out of its documented range */
  M3_ERROR_IO = 2,          /* the file cannot be opened, read or mapped */
  M3_ERROR_FORMAT = 3,      /* not a valid GGUF file, or truncated */
  M3_ERROR_MODEL = 4,       /* a valid GGUF file whose model cannot be run: architecture, keys, tensors */
  M3_ERROR_MEMORY = 5,      /* the machine has not the memory that was asked for */
  M3_ERROR_CONTEXT = 6,     /* the tokens do not fit in the sequence or the session has no free page */
  M3_ERROR_NOT_FINITE = 7,  /* NaN or infinity came out of a layer; the message names it */
  M3_ERROR_CANCELLED = 8,   /* m3_session_cancel was called during eval */
  M3_ERROR_UNSUPPORTED = 9, /* a device or instruction set that this build or machine lacks */
  M3_ERROR_UNBOUND = 10,    /* a weight that the evaluated layers need has no data bound */
  M3_ERROR_DEVICE = 11      /* the device failed; the message is its own */
} m3_status;

typedef struct m3_error {
  int32_t code;      /* an m3_status */
  char message[768]; /* one line, NUL-terminated, control characters replaced by '?'; names of files and tensors
                      * stand in it byte for byte, so that it is UTF-8 only as far as they are */
} m3_error;

/* Tensor types by their GGUF number; block sizes in elements and bytes. Types that are not listed are refused by name
 * or number. */
typedef enum m3_type {
  M3_TYPE_F32 = 0,
  M3_TYPE_F16 = 1,
  M3_TYPE_Q4_0 = 2,     /* 32, 18: scale */
  M3_TYPE_Q4_1 = 3,     /* 32, 20: scale, offset */
  M3_TYPE_Q5_0 = 6,     /* 32, 22 */
  M3_TYPE_Q5_1 = 7,     /* 32, 24 */
  M3_TYPE_Q8_0 = 8,     /* 32, 34: float16 scale, then 32 int8 */
  M3_TYPE_Q2_K = 10,    /* 256, 84: scale and offset for each 16 */
  M3_TYPE_Q3_K = 11,    /* 256, 110: scale for each 16 */
  M3_TYPE_Q4_K = 12,    /* 256, 144: scale and offset for each 32 */
  M3_TYPE_Q5_K = 13,    /* 256, 176: scale and offset for each 32 */
  M3_TYPE_Q6_K = 14,    /* 256, 210: scale for each 16 */
  M3_TYPE_IQ2_XXS = 16, /* 256, 66: codebook; to write it needs importance */
  M3_TYPE_IQ2_XS = 17,  /* 256, 74: codebook; needs importance */
  M3_TYPE_IQ3_XXS = 18, /* 256, 98: codebook */
  M3_TYPE_IQ1_S = 19,   /* 256, 50: codebook; needs importance */
  M3_TYPE_IQ4_NL = 20,  /* 32, 18: scale, uneven steps */
  M3_TYPE_IQ3_S = 21,   /* 256, 110: codebook */
  M3_TYPE_IQ2_S = 22,   /* 256, 82: codebook */
  M3_TYPE_IQ4_XS = 23,  /* 256, 136: scale for each 32, uneven steps */
  M3_TYPE_IQ1_M = 29,   /* 256, 56: codebook; needs importance */
  M3_TYPE_BF16 = 30,
  M3_TYPE_MXFP4 = 39 /* 32, 17: a power of two, E2M1 numbers */
} m3_type;

typedef enum m3_device { M3_DEVICE_AUTO = 0, M3_DEVICE_CPU = 1, M3_DEVICE_CUDA = 2 } m3_device;

/* Instruction set of the CPU kernels. AUTO takes the widest one the machine has. SCALAR is the specification;
 * the others may differ from it by float32 rounding only. */
typedef enum m3_isa {
  M3_ISA_AUTO = 0,
  M3_ISA_SCALAR = 1,
  M3_ISA_AVX2 = 2,   /* AVX2, FMA, F16C */
  M3_ISA_AVX512 = 3, /* AVX-512 F, BW, VL, DQ */
  M3_ISA_NEON = 4
} m3_isa;

/* Where the CPU finds the weights of a file. */
typedef enum m3_load {
  M3_LOAD_MAP = 0, /* in the mapped file: read when they are first used, given up when the system is short of memory */
  M3_LOAD_READ = 1 /* in memory of the process, where m3_model_load reads them to */
} m3_load;

/* Where the routed experts of a model on a GPU are computed. On the CPU: by the operation of the CPU backend, with its
 * rounding, from the mapped file or the data that was bound; nothing of them is copied or pinned. What travels, through
 * pinned memory, is for each row of a chunk its normed state down and the sum of its experts up, which is added behind
 * the shared expert, on which the GPU works meanwhile. */
typedef enum m3_experts_on {
  M3_EXPERTS_AUTO = 0, /* layer by layer on the GPU as far as its memory allows, see m3_model_place */
  M3_EXPERTS_GPU = 1,  /* what AUTO is for a header */
  M3_EXPERTS_CPU = 2
} m3_experts_on;

typedef enum m3_attention {
  M3_ATTENTION_SPARSE = 0, /* what the model was trained for */
  M3_ATTENTION_DENSE = 1   /* every layer reads every visible token: out of distribution for the sparse layers */
} m3_attention;

/* How one or a few queries (decoding) find their blocks. The lists are the same, bit for bit. */
typedef enum m3_index_scan {
  M3_INDEX_SCAN_AUTO = 0,   /* low-bit where it was measured to pay: from contexts of 16,384 tokens on; on a GPU, by the
                             * kernels that m3_session_msa tells, of 262,144, or 524,288 where keys have 16 bits */
  M3_INDEX_SCAN_FULL = 1,   /* reads every index key */
  M3_INDEX_SCAN_LOW_BIT = 2 /* reads int8 copies with the norm of their error, which bound the scores, and then the keys
                             * of the blocks (on a GPU the tokens) that the bounds do not rule out. The copies add 8
                             * bytes (4) and one byte a channel (in 32s) to each index key */
} m3_index_scan;

/* Version of this interface (M3_ABI_VERSION of the library). */
int32_t m3_abi_version(void);

/* Program version, "major.minor.patch"; static storage. */
const char *m3_version(void);

/* Threads that an n_threads of 0 stands for, "all cores": the physical cores that this process may run on (hardware
 * threads of one core slow each other down here), or fewer where a control group gives it less time. */
int32_t m3_default_threads(void);

/* Most threads that an n_threads may ask for: the processors, or M3_FEW_THREADS on a machine with fewer. A thread
 * that cannot be created ends the process inside the OpenMP runtime, where no error can be returned. */
int32_t m3_max_threads(void);

/* For programs, not for libraries: from now on, a mapped file that is shorter than it was when its bytes are used, or
 * that the disk does not give, ends the process with one line on stderr, "NAME: FILE: ...", and with the exit code
 * changed_code or failed_code, without unwinding (_exit). The kernel tells of it by SIGBUS in the middle of an
 * instruction, where no function could return an error. For the whole process and all mapped files, those that the
 * engine did not map too. `name` is copied and is shorter than 64 bytes (M3_ERROR_ARGUMENT). Has no effect if the
 * program has a handler of SIGBUS, this one included; a SIGBUS of other causes ends the process as ever. */
m3_status m3_end_on_bus_error(const char *name, int32_t changed_code, int32_t failed_code, m3_error *err);

/* ------------------------------------------------------------------------------------------------ types */

/* Name of a type as GGUF tools print it ("Q8_0"), or NULL for a type the engine does not know; static storage. */
const char *m3_type_name(int32_t type);

/* Elements per block of a type (1 for F32, F16, BF16), 0 for an unknown type. */
int64_t m3_type_block_size(int32_t type);

/* 1 for a type that m3_quantize writes with importance only (IQ2_XXS, IQ2_XS, IQ1_S, IQ1_M), else 0. */
int32_t m3_type_needs_importance(int32_t type);

/* Magnitudes above it have no finite value in the type, and m3_quantize refuses them; 0 for an unknown type. */
float m3_type_largest(int32_t type);

/* Bytes of one row of n elements, or -1 if the type is unknown, n is negative or not a multiple of its block. */
int64_t m3_row_bytes(int32_t type, int64_t n);

/* Rows in float32 and in a storage type; one struct for both directions. */
typedef struct m3_row_set {
  uint32_t struct_size;
  int32_t type; /* an m3_type */
  int64_t n_rows;
  int64_t n_per_row; /* a whole number of the type's blocks */
  float *values;     /* [n_rows, n_per_row] */
  void *data;        /* [n_rows, m3_row_bytes(type, n_per_row)]; an even address, of F32 a multiple of 4 (MXFP4: any) */
  int64_t data_bytes; /* size of data; must be that product */
  int32_t n_threads;  /* 0 takes all cores (see m3_default_threads, m3_max_threads) */
  /* [n_per_row] weights of the squared error of each column, the same for every row; finite, at least 0. NULL: all
   * equal, which a block whose weights are all 0 falls back to. Types that only round take no notice of it, nor does
   * m3_dequantize. */
  const float *importance;
} m3_row_set;

/* values to data. F32, F16 and BF16 round to nearest even. Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 take their scale in float32
 * from the extremes of the block, store it as float16 and round to nearest, ties away from zero (Q8_0) or up; their
 * bytes are those of GGUF's other writers. The other types search for the least error, weighted by importance. The
 * bytes do not depend on n_threads. Refused with M3_ERROR_NOT_FINITE: NaN or infinity in values; a finite value that
 * the type cannot hold (above 65520 but for F32, BF16 and MXFP4, and for Q4_0, Q5_0 and Q8_0, which reach 8, 16 and 127
 * times as far). The message names the row, the column, the value and how many there are. Refused with
 * M3_ERROR_ARGUMENT: importance out of its range, or NULL for a type that needs it. With M3_ERROR_UNSUPPORTED: a type
 * that can only be read. data may be written in part on failure. */
m3_status m3_quantize(const m3_row_set *rows, m3_error *err);

/* data to values. Exact: every stored value has one float32 value, bit for bit that of GGUF's other readers. Nothing in
 * data is refused: a scale that is NaN or infinite gives such values. */
m3_status m3_dequantize(const m3_row_set *rows, m3_error *err);

/* ------------------------------------------------------------------------------------------------ GGUF */

typedef struct m3_gguf m3_gguf;

/* Value types of GGUF metadata, by their number in the file. */
typedef enum m3_kv_type {
  M3_KV_U8 = 0,
  M3_KV_I8 = 1,
  M3_KV_U16 = 2,
  M3_KV_I16 = 3,
  M3_KV_U32 = 4,
  M3_KV_I32 = 5,
  M3_KV_F32 = 6,
  M3_KV_BOOL = 7,
  M3_KV_STRING = 8,
  M3_KV_ARRAY = 9,
  M3_KV_U64 = 10,
  M3_KV_I64 = 11,
  M3_KV_F64 = 12
} m3_kv_type;

typedef struct m3_string {
  const char *data; /* UTF-8 by the format, not checked; not NUL-terminated */
  uint64_t size;    /* bytes */
} m3_string;

typedef struct m3_kv {
  m3_string key;
  int32_t type;             /* an m3_kv_type; arrays give M3_KV_ARRAY */
  int32_t element_type;     /* of an array, else equal to type */
  uint64_t n;               /* elements; 1 for a scalar */
  const void *data;         /* packed little-endian numbers, unaligned; NULL for strings */
  const m3_string *strings; /* [n] for a string or an array of strings, else NULL */
} m3_kv;

typedef struct m3_tensor {
  m3_string name;
  int32_t type;    /* GGUF type number */
  int32_t n_dims;  /* 1 to 4 */
  int64_t ne[4];   /* ne[0] contiguous; unused ones are 1 */
  uint64_t offset; /* from the start of its file, 0 if the file holds the header only */
  uint64_t n_bytes;
  const void *data; /* in the mapped file; NULL if it holds the header only */
  int32_t file;     /* which of m3_gguf_n_files it lies in, from 0 */
} m3_tensor;

/* Opens and validates a file: every count, offset and size is checked against the file before it is used.
 * The file is mapped read-only; what the accessors return points into the mapping or the object and is valid
 * until m3_gguf_close.
 * A model may be split into files NAME-00001-of-0000N.gguf (split.no, split.count, split.tensors.count), all in one
 * folder. `path` is any of them, or the folder if it holds one such model; all are opened. Keys are those of the first.
 * A missing one is an M3_ERROR_IO that names it; files that do not belong together are M3_ERROR_FORMAT: by these keys,
 * or by m3.split.id, a text that m3-convert writes into all files of a conversion and other programs into none. */
m3_status m3_gguf_open(const char *path, m3_gguf **out, m3_error *err);

/* Parses a header that the caller holds (metadata and tensor list, no tensor data). The bytes are copied.
 * `name` stands for the file name in messages. */
m3_status m3_gguf_parse_header(const void *bytes, uint64_t n_bytes, const char *name, m3_gguf **out, m3_error *err);

void m3_gguf_close(m3_gguf *gguf); /* NULL is allowed */

int64_t m3_gguf_n_kv(const m3_gguf *gguf);
int64_t m3_gguf_n_tensors(const m3_gguf *gguf);

/* Files of the model: 1, or split.count. The i-th file's name, NULL if i is out of range; bytes of all together. */
int64_t m3_gguf_n_files(const m3_gguf *gguf);
const char *m3_gguf_file_name(const m3_gguf *gguf, int64_t i);
uint64_t m3_gguf_file_bytes(const m3_gguf *gguf);

/* The i-th key or tensor in file order, NULL if i is out of range. */
const m3_kv *m3_gguf_kv(const m3_gguf *gguf, int64_t i);
const m3_tensor *m3_gguf_tensor(const m3_gguf *gguf, int64_t i);

/* By name (NUL-terminated), NULL if absent. */
const m3_kv *m3_gguf_find_kv(const m3_gguf *gguf, const char *key);
const m3_tensor *m3_gguf_find_tensor(const m3_gguf *gguf, const char *name);

/* ------------------------------------------------------------------------------------------------ model */

typedef struct m3_model m3_model;

/* Dimensions of a model, read from the file. */
typedef struct m3_hparams {
  int32_t n_layer;
  int32_t n_dense_layer; /* leading layers with full attention and a dense MLP */
  int32_t n_embd;
  int32_t n_head;
  int32_t n_head_kv;
  int32_t head_dim;
  int32_t n_rot; /* rotated channels of each q, k, index q and index k head, the first ones */
  int32_t n_ff;  /* width of the dense MLP */
  int32_t n_ff_expert;
  int32_t n_ff_shared; /* n_ff_expert * shared experts; 0 without shared experts */
  int32_t n_expert;
  int32_t n_expert_used;
  int32_t n_vocab;
  int32_t n_index_head; /* equals n_head_kv: one block list for each KV head */
  int32_t index_dim;
  int32_t top_k; /* blocks that one query reads, local ones included */
  int32_t block_size;
  int32_t local_blocks; /* blocks that are always read: the query's own and those before it */
  int64_t context_train;
  float rope_theta;
  float rms_eps;
  float expert_scale; /* factor on the routed sum */
  float swiglu_alpha; /* 1.702 and 7: constants of the architecture, not in the file */
  float swiglu_limit;
} m3_hparams;

typedef struct m3_model_options {
  uint32_t struct_size;
  int32_t device; /* an m3_device; AUTO is the GPU where library, driver and machine have what it needs, else the CPU */
  int32_t isa;    /* an m3_isa; one that the machine lacks is M3_ERROR_UNSUPPORTED */
  int32_t load;   /* an m3_load; READ is M3_ERROR_ARGUMENT for a header, and for a GPU, which has a copy anyway */
  int32_t experts_on; /* an m3_experts_on; GPU is M3_ERROR_ARGUMENT for a model on the CPU */
} m3_model_options;

/* Opens a GGUF file and binds every weight to its mapping. options may be NULL. Refused by name: another
 * architecture; a file of the generations without (or with older names of) the indexer tensors; missing,
 * extra or mis-shaped tensors; types and dimensions out of the limits above. */
m3_status m3_model_open(const char *path, const m3_model_options *options, m3_model **out, m3_error *err);

/* The same from a header only (m3_gguf_parse_header): the weights have types and shapes but no data until
 * m3_model_bind gives them some. */
m3_status m3_model_open_header(const void *bytes, uint64_t n_bytes, const char *name, const m3_model_options *options,
                               m3_model **out, m3_error *err);

void m3_model_close(m3_model *model); /* NULL is allowed; sessions of it must be closed first */

/* Binds data to a weight of a header-only model. `expert` picks one matrix of a stacked expert tensor, -1
 * means the whole tensor. n_bytes must be the size that type and shape ask for, and the address aligned as that of
 * m3_row_set.data. The data is not copied: it must stay valid and unchanged until m3_model_unbind_layer, a second bind,
 * or close. (A GPU gets its copy at once.) */
m3_status m3_model_bind(m3_model *model, const char *tensor, int32_t expert, const void *data, uint64_t n_bytes,
                        m3_error *err);

/* Forgets the data of layer `layer` (0-based), or of the tensors outside the layers (embeddings, output norm,
 * head) if layer is -1. Only for header-only models. */
m3_status m3_model_unbind_layer(m3_model *model, int32_t layer, m3_error *err);

/* Brings the weights that sessions of layers [layer_first, layer_first + layer_count) need to the model's device, or
 * with M3_LOAD_READ to memory; a count of 0 is all from layer_first. m3_session_open does it too; to do it before shows
 * how far it is. What is there stays until close. Nothing to do for a mapped file on the CPU and in header-only models.
 * M3_ERROR_MEMORY, M3_ERROR_IO, M3_ERROR_DEVICE, M3_ERROR_CANCELLED. */
m3_status m3_model_load(m3_model *model, int32_t layer_first, int32_t layer_count, m3_error *err);

/* Bytes brought and to bring by the running load, or the last one; and its end before time. Any thread may call them.
 */
void m3_model_load_progress(const m3_model *model, uint64_t *done, uint64_t *total);
void m3_model_cancel_load(m3_model *model);

/* Bytes of the model's device that are free and there in all; both 0 for the CPU, where the operating system knows. */
m3_status m3_model_device_memory(const m3_model *model, uint64_t *free_bytes, uint64_t *total_bytes, m3_error *err);

const m3_hparams *m3_model_hparams(const m3_model *model); /* valid until close */
const m3_gguf *m3_model_gguf(const m3_model *model);       /* metadata; valid until close */
const char *m3_model_backend_name(const m3_model *model);  /* "cpu", "cuda" */
const char *m3_model_device_name(const m3_model *model);   /* of the GPU, or the instruction set; valid until close */
const char *m3_model_isa_name(const m3_model *model);      /* "scalar", "avx2", "avx512", "neon" */

/* By which code the device multiplies with weights of a type; static storage, NULL for an unknown type. "integer": by
 * vector instructions in integers, activations rounded to 16 bits; "float": by vector instructions in float32; "plain":
 * by code without them, which is many times slower; "device": on a GPU, which has one way for all types. */
const char *m3_model_product_path(const m3_model *model, int32_t type);

/* ------------------------------------------------------------------------------------------------ session */

typedef struct m3_session m3_session;

/* What eval records for m3_session_blocks, m3_session_block_scores, m3_session_importance and m3_session_mass. */
#define M3_RECORD_BLOCKS 1
#define M3_RECORD_SCORES 2
#define M3_RECORD_IMPORTANCE 4
#define M3_RECORD_MASS 8

/* A page fresh from the pool is filled with NaN, so that a read of a row that no token wrote shows in the
 * result. For tests. */
#define M3_SESSION_POISON 1

/* Float32 products and sums everywhere, and results that do not depend on how rows are cut into evals and chunks, bit
 * for bit. The CPU always computes so, but that it rounds the inputs of weights of block types (to 16 bits for each 32
 * of them, an error below 1.6e-5 of the largest). A GPU without this flag is much faster and computes
 *   - products with these inputs rounded too, number by number as the CPU does, and exact integer products of groups of
 *     16 or 32 columns added up, so that they have the CPU's precision for any number of rows; but the float32 sums of
 *     the groups are taken in one order where a chunk (or, for the output head, what it computes logits of at once) has
 *     up to 8 rows, and in another where it has more: the same row may then differ by float32 rounding, some 1e-6 of
 *     the result;
 *   - block lists from scores in float32 or as good as that: they differ from the exact ones only in blocks whose
 *     scores are nearer to each other than 2^-18 of |q| |k|, by the number of rows in a chunk too;
 *   - attention of up to 16 rows of a sequence in a chunk with an error like that of float32, the last bits of which
 *     depend on how many rows the chunk has, and of more of them with queries and softmax weights rounded to the type
 *     of the cached keys and values, in the checks up to 8e-4 (F16) or 7e-3 (BF16) of the norm of a head's result.
 * The last two for caches of types and heads of sizes that m3_session_msa tells. That is the default because rounding
 * of that size is what the cache's type has done to keys and values already, and because no choice of blocks of its own
 * layer hangs on it. Nothing else in the chunk changes a result. What compares selections asks for this flag. */
#define M3_SESSION_EXACT 2

typedef struct m3_session_options {
  uint32_t struct_size;
  int32_t sequences;   /* 1 to M3_MAX_SEQUENCES; 0 is 1 */
  int64_t context;     /* tokens that one sequence can hold; at least 1 */
  int32_t kv_type;     /* F32 (which is 0), F16, BF16, or Q8_0 and Q4_0 where 32 divides head_dim */
  int32_t index_type;  /* the same for index_dim */
  int32_t attention;   /* an m3_attention */
  int32_t index_scan;  /* an m3_index_scan; LOW_BIT where it is not, as in plain sessions on a GPU, is
                        * M3_ERROR_UNSUPPORTED */
  int32_t n_threads;   /* 0 takes all cores (see m3_default_threads). The result does not depend on it */
  int32_t chunk;       /* rows evaluated together, 0 is 512. The result does not depend on it, see M3_SESSION_EXACT */
  int32_t layer_first; /* layers [layer_first, layer_first + layer_count); a count of 0 is all from layer_first. A */
  int32_t layer_count; /* window at n_layer has no layer: hidden states go through output norm and head only */
  uint32_t record;     /* M3_RECORD_ bits */
  uint32_t flags;      /* M3_SESSION_ bits */
  uint64_t page_seed;  /* 0: pages are taken in order; else in an order shuffled by it. The result is the same */
  int64_t pages;       /* of the pool that all sequences share, see m3_session_pages; 0: enough for every sequence to
                        * be full, which is the most. With fewer, an eval or a drop that finds too few free ones is
                        * M3_ERROR_CONTEXT and takes none */
} m3_session_options;

/* Bytes that a session takes, on the model's device (m3_plan has those of the computer beside a GPU). Address space is
 * reserved when the session opens; cache pages cost memory when first written. What an eval records comes on top, in
 * each sparse layer: n_tokens * 4 * (n_index_head * top_k for blocks, n_index_head * number of blocks for scores,
 * n_head * top_k for masses). */
typedef struct m3_memory {
  uint64_t kv_bytes;
  uint64_t index_bytes;   /* with low-bit copies, if the session keeps them */
  uint64_t scratch_bytes; /* grows with the chunk, not with chunk * context, unless scores are recorded; sums that
                           * M3_RECORD_IMPORTANCE asks for are part of it */
} m3_memory;

/* What m3_session_open would take. */
m3_status m3_session_memory(const m3_model *model, const m3_session_options *options, m3_memory *out, m3_error *err);

/* What a session would need, and where, its weights included. On a GPU it fits if weight_bytes + expert_bytes -
 * loaded_bytes + kv_bytes + index_bytes + scratch_bytes are no more than free_bytes. */
typedef struct m3_plan {
  uint64_t weight_bytes;     /* of the window, on the device, without routed experts; on the CPU in the file or read */
  uint64_t expert_bytes;     /* routed experts on the device; on the CPU likewise */
  uint64_t cpu_expert_bytes; /* routed experts that a model on a GPU computes on the CPU: they stay in the file */
  uint64_t loaded_bytes;     /* of weight_bytes and expert_bytes: on the GPU already */
  uint64_t kv_bytes, index_bytes, scratch_bytes; /* as in m3_memory */
  uint64_t host_bytes;              /* of the computer's memory for work on cpu_expert_bytes, 0 without them */
  uint64_t pinned_bytes;            /* of host_bytes: 8 * chunk * (n_embd + n_expert_used), rounded up */
  int32_t expert_layers;            /* of the window, that have experts */
  int32_t cpu_expert_layers;        /* of these: computed on the CPU by a model on a GPU */
  uint64_t free_bytes, total_bytes; /* as from m3_model_device_memory */
} m3_plan;

/* The plan of m3_session_open. As long as nothing is placed, with M3_EXPERTS_AUTO, as m3_model_place would place.
 * Weights of a header-only model, which are brought when they are bound, count as on the GPU already. */
m3_status m3_session_plan(const m3_model *model, const m3_session_options *options, m3_plan *out, m3_error *err);

/* Decides where the experts of a model on a GPU are that was opened with M3_EXPERTS_AUTO: beside the other weights of
 * the session and what it takes itself, and a margin of 1/32 of the GPU's memory, at most 2 GiB, the experts of as many
 * whole layers as fit go to the GPU, from the session's first layer on; those of its other layers stay on the CPU. What
 * fits as a whole, without a margin, is not split. The first call decides, later ones change nothing, and
 * m3_session_open calls it. m3_model_load without a call before brings all experts to the GPU. */
m3_status m3_model_place(m3_model *model, const m3_session_options *options, m3_error *err);

/* Where a model computes the routed experts of a layer: M3_EXPERTS_GPU, M3_EXPERTS_CPU; M3_EXPERTS_AUTO where that is
 * not decided, in layers without experts, and if layer is out of range. */
int32_t m3_model_experts_on(const m3_model *model, int32_t layer);

/* Writes which kernels select blocks and attend in such a session to `out` (n_bytes, cut if it is longer): on a GPU
 * "hopper", or "plain (WHY)", or what of it is plain, and whether index keys have low-bit copies; nothing where there
 * is one way only, as on the CPU. */
m3_status m3_session_msa(const m3_model *model, const m3_session_options *options, char *out, uint64_t n_bytes,
                         m3_error *err);

/* Opens a session with `sequences` empty sequences, numbered from 0. Its layer window needs bound weights only
 * when eval runs. */
m3_status m3_session_open(m3_model *model, const m3_session_options *options, m3_session **out, m3_error *err);

void m3_session_close(m3_session *session); /* NULL is allowed */

/* Rows of one sequence, appended at its end. */
typedef struct m3_span {
  int32_t seq;
  int32_t n; /* at least 1 */
} m3_span;

typedef enum m3_output {
  M3_OUTPUT_LAST = 0,  /* logits of the last row of each span: [n_spans, n_vocab] */
  M3_OUTPUT_ALL = 1,   /* logits of every row: [n_tokens, n_vocab] */
  M3_OUTPUT_HIDDEN = 2 /* hidden state after the last layer of the window, before the output norm: [n_tokens, n_embd] */
} m3_output;

typedef struct m3_batch {
  uint32_t struct_size;
  int32_t output;       /* an m3_output; logits need a window that ends with the last layer */
  int64_t n_tokens;     /* sum of the spans' n */
  const int32_t *ids;   /* [n_tokens], in span order; needed when the window starts at layer 0, else NULL. -1: a row of
                         * `embeddings` */
  const float *hidden;  /* [n_tokens, n_embd] entering layer_first; needed when it is not 0, else NULL */
  int32_t n_spans;      /* a sequence may appear once */
  const m3_span *spans; /* [n_spans] */
  float *out;           /* float32, shape by `output`, owned by the caller */
  int64_t out_count;    /* elements that `out` holds; must be what `output` asks for */
  /* Lists that the sparse layers of the window read in place of the selected ones, which are then not computed, or
   * NULL: [sparse layers, n_tokens, n_index_head, top_k] as m3_session_blocks gives them: at least one block,
   * ascending, none beyond the row's own, padded with -1. They are what is recorded as blocks. Not in dense attention.
   */
  const int32_t *blocks;
  int64_t blocks_count; /* elements of `blocks` */
  /* What the rows whose id is -1 enter layer 0 with in place of an embedding of the vocabulary (tokens of images), in
   * their order, or NULL: [rows of id -1, n_embd]. */
  const float *embeddings;
  int64_t embeddings_count; /* elements of `embeddings` */
} m3_batch;

/* Runs the window's layers over the batch and appends its rows to the sequences. Rows see their own sequence
 * only, causally, and their results do not depend on what else is in the batch or on how a sequence was cut into
 * evals (on a GPU with M3_SESSION_EXACT). On any error the lengths are what they were. */
m3_status m3_session_eval(m3_session *session, const m3_batch *batch, m3_error *err);

/* Asks a running eval to stop (M3_ERROR_CANCELLED) within about one layer of one chunk; on a GPU, within what remains
 * of the chunk, or up to the next layer with experts on the CPU. No effect otherwise. */
void m3_session_cancel(m3_session *session);

/* Row-layers done and in all of the running eval (or the last one); both 0 before the first. */
void m3_session_progress(const m3_session *session, int64_t *done, int64_t *total);

/* Tokens held by a sequence, -1 if seq is out of range. */
int64_t m3_session_length(const m3_session *session, int32_t seq);

/* Keeps the first `length` tokens (0 <= length <= current length); pages past them return to the pool. */
m3_status m3_session_rewind(m3_session *session, int32_t seq, int64_t length, m3_error *err);

/* Makes dst (its old content dropped) a copy of src that shares its pages; a shared page is copied when either
 * side writes to it. dst == src is an error. */
m3_status m3_session_fork(m3_session *session, int32_t src, int32_t dst, m3_error *err);

/* Block lists of the last eval of a sparse layer (absolute number), with M3_RECORD_BLOCKS: int32
 * [n_tokens, n_index_head, top_k], ascending, padded with -1 at the end. count = elements of dst. */
m3_status m3_session_blocks(const m3_session *session, int32_t layer, int32_t *dst, int64_t count, m3_error *err);

/* Block scores of the last eval, before local blocks are forced, with M3_RECORD_SCORES: float32
 * [n_tokens, n_index_head, n_blocks], n_blocks = blocks of the longest sequence in the batch after the eval;
 * -infinity for blocks that the row cannot see. */
m3_status m3_session_block_scores(const m3_session *session, int32_t layer, float *dst, int64_t count, m3_error *err);
int64_t m3_session_n_blocks(const m3_session *session); /* that n_blocks; 0 before the first eval */

/* Attention masses of the last eval, with M3_RECORD_MASS: float32 [n_tokens, n_head, top_k], the share of its softmax
 * that a query head gives to the tokens of each block of the list of its index head (head / (n_head / n_index_head)); 0
 * for padding. The shares of a head add up to 1 within rounding. */
m3_status m3_session_mass(const m3_session *session, int32_t layer, float *dst, int64_t count, m3_error *err);

/* What a weight matrix was multiplied with, summed over all evals of the session. */
typedef struct m3_importance {
  uint32_t struct_size;
  int64_t n_matrix; /* 1, or the number of experts of a stacked tensor */
  int64_t n_in;     /* columns of a matrix (ne[0]) */
  double *sums;     /* [n_matrix, n_in] out: sum of x^2 of each column over the input rows x of the matrix */
  int64_t *counts;  /* [n_matrix] out: how many rows these were; 0 for an expert that no row was sent to */
} m3_importance;

/* Importance of a weight of the window, with M3_RECORD_IMPORTANCE. `tensor` names attn_q, attn_k, attn_v, attn_output,
 * indexer.q_proj, indexer.k_proj, the router, or a gate, up or down matrix of MLP, shared or routed experts in one of
 * the window's layers, or "output.weight" if the window ends with the last layer. The caller fills in and owns `out`,
 * whose sizes must be those of the tensor. M3_ERROR_ARGUMENT for another tensor, other sizes, index projections in
 * dense attention, and a session that does not record it; a backend that cannot is M3_ERROR_UNSUPPORTED at
 * m3_session_open.
 *
 * Counted is every row of every eval that succeeded, whatever its output was (of the head too, which needs
 * output_norm bound); rewinding takes nothing back; an eval that failed leaves no trace. Squares are exact and added
 * in double precision in the order of the rows: how rows are cut into evals and chunks, and the number of threads,
 * change no bit as long as they change no bit of the activations, which they do not; between instruction sets the
 * sums differ as far as the activations do, by float32 rounding. Sums are finite: an eval that computes NaN or
 * infinity fails. */
m3_status m3_session_importance(const m3_session *session, const char *tensor, const m3_importance *out, m3_error *err);

/* Work of low-bit index scans in all evals so far: blocks that were bounded, and how many of them were then scored
 * exactly; counted once a row and layer. A GPU scores tokens: counted as the blocks that as many fill. Both 0 while no
 * scan was low-bit. */
void m3_session_scan(const m3_session *session, int64_t *bounded, int64_t *rescored);

/* Pages in use and in all (a page holds block_size tokens of every layer of the window). One that several sequences
 * share counts once. */
void m3_session_pages(const m3_session *session, int64_t *used, int64_t *total);

/* Drops blocks [first_block, first_block + n_blocks) of a sequence, which must be full, and moves the tokens behind
 * them down by n_blocks * block_size positions. Their cached keys and index keys turn to the new positions: each by the
 * difference of the angles, as float32, that the model gives to the two positions. Pages that other sequences share are
 * copied first; M3_ERROR_CONTEXT where the pool is short of them. On an error nothing has changed (but for
 * M3_ERROR_DEVICE, after which the session is of no use).
 *
 * What this gives: in an F32 cache every key is the one that its token would have at the new position, as far as
 * float32 rounds (some 1e-7 of its length for each drop); in other types it is rounded to the type once more, Q8_0 and
 * Q4_0 in the blocks of 32 that have channels that turn. Other channels and values keep their bits. Selection and
 * attention are those of the cache as it then is.
 * What it cannot give: keys and values of all layers but the first were computed from rows that had read the dropped
 * text, and stay so. The sequence is not what an evaluation of its remaining tokens alone would make; one that shall be
 * is evaluated again. */
m3_status m3_session_drop(m3_session *session, int32_t seq, int64_t first_block, int64_t n_blocks, m3_error *err);

/* Bytes of an exported page: for each layer of the window K and V [n_head_kv, block_size, head_dim] in kv_type and, in
 * a layer that selects, the index keys [block_size, index_dim] in index_type, one after the other without gaps. The
 * same on every backend. */
uint64_t m3_session_page_bytes(const m3_session *session);

/* Writes a block of a sequence, its last one too, to dst. Rows that no token of the sequence stands in are zero. */
m3_status m3_session_export(m3_session *session, int32_t seq, int64_t block, void *dst, uint64_t n_bytes,
                            m3_error *err);

/* Appends a page that was exported from a session of the same model, types and layers to a sequence whose length is a
 * whole number of blocks: its first n_tokens (1 to block_size) tokens. Nothing tells whether the bytes are such a page;
 * numbers that are none show in an eval (M3_ERROR_NOT_FINITE). On an error nothing has changed, but as for drop. */
m3_status m3_session_import(m3_session *session, int32_t seq, int32_t n_tokens, const void *src, uint64_t n_bytes,
                            m3_error *err);

/* ------------------------------------------------------------------------------------------------ vision */

/* The vision tower of a model with its projector and patch merger, from a file of its own (architecture "clip",
 * projector "minimax_m3", as llama.cpp writes it). It turns the patches of images into tokens, rows as wide as the
 * text model's embeddings, in float32. */
typedef struct m3_vision m3_vision;

typedef struct m3_vision_hparams {
  int32_t n_layer;
  int32_t n_embd;
  int32_t n_head;
  int32_t head_dim;
  int32_t n_rot; /* rotated channels of a head, in thirds for time, height and width */
  int32_t n_ff;
  int32_t n_projector; /* width inside the projector of a patch */
  int32_t n_merger;    /* width inside the merger */
  int32_t n_out;       /* width of a token */
  int32_t patch_size;  /* pixels on a side of a patch */
  int32_t merge;       /* 2: patches on a side of the square that becomes a token */
  int32_t frames;      /* 2: frames of a patch; an image is given twice */
  float rope_theta;    /* 10000: a constant of the architecture, not in the file */
  float eps;           /* of the norms */
  float mean[3];       /* of red, green and blue, pixels being from 0 to 1: what was taken off the values */
  float std[3];        /* what they were divided by then */
} m3_vision_hparams;

typedef struct m3_vision_options {
  uint32_t struct_size;
  int32_t device; /* AUTO and CPU are the CPU, CUDA is M3_ERROR_UNSUPPORTED */
  int32_t isa;    /* an m3_isa */
} m3_vision_options;

/* Opens a vision file, which stays mapped. options may be NULL. Refused by name: another architecture or projector;
 * missing, extra or mis-shaped tensors; norms, biases and patch embedding that are not F32; dimensions out of the
 * limits. */
m3_status m3_vision_open(const char *path, const m3_vision_options *options, m3_vision **out, m3_error *err);

void m3_vision_close(m3_vision *vision); /* NULL is allowed */

const m3_vision_hparams *m3_vision_dimensions(const m3_vision *vision); /* valid until close */
const m3_gguf *m3_vision_gguf(const m3_vision *vision);                 /* metadata; valid until close */

/* Patches of one image (t is 1) or of a clip of 2 t frames; h and w are even. At most M3_MAX_PATCHES in all. */
typedef struct m3_vision_grid {
  int32_t t, h, w;
} m3_vision_grid;

/* Images by themselves: none sees another. n is the sum of t * h * w of the grids.
 * Patches of an image stand in the order of their squares of 2 x 2, row by row, in a square again row by row, and t
 * outermost. A patch is [3 channels, 2 frames, patch_size, patch_size] of normalized values. */
typedef struct m3_vision_batch {
  uint32_t struct_size;
  int32_t n_threads;           /* 0 takes all cores (see m3_default_threads). The result does not depend on it */
  int32_t n_images;            /* 1 to M3_MAX_IMAGES */
  const m3_vision_grid *grids; /* [n_images] */
  const float *pixels;         /* [n, 3 * 2 * patch_size^2], finite */
  int64_t pixels_count;        /* elements of it */
  float *out;                  /* [n / 4, n_out] tokens, in the order of the squares; owned by the caller */
  int64_t out_count;
} m3_vision_batch;

/* Encodes images. Memory grows with the largest one: some 4 * (10 n_embd + n_ff + n_out) bytes a patch. One call at a
 * time for each m3_vision. M3_ERROR_NOT_FINITE names the layer; after an error `out` may be written in part. */
m3_status m3_vision_encode(m3_vision *vision, const m3_vision_batch *batch, m3_error *err);

/* Asks a running encode to stop (M3_ERROR_CANCELLED) within about one layer of one image. Any thread may call it. */
void m3_vision_cancel(m3_vision *vision);

/* [end of declarations] */

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif

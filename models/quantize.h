/* quantize.h - create model files: pack numbers into the storage types, write GGUF, and rewrite a
 * model in another type. `llm quantize`, `llm synth`, the lessons and the tests use it; to run a
 * model, llm.h alone is enough. Compile quantize.c and link it with an object that has llm.h's
 * implementation. */
#ifndef LLM_QUANTIZE_H
#define LLM_QUANTIZE_H

#include "../llm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The reverse of llm_type_info.unpack, for every type that llm_type_find accepts. count: a multiple
 * of the type's block_values. Values and blocks need no alignment beyond that of their elements. */
void llm_pack(llm_type type, const float *values, void *blocks, int64_t count);

/* Write a GGUF v3 file: all metadata, then all tensor declarations, then the data of each tensor in
 * that order. The bytes go to "PATH.tmp", which llm_writer_finish renames to PATH when all data is
 * on the disk, so a full disk or a killed process never leaves half a model. After an error, all
 * calls fail, so it is enough to check the result of llm_writer_finish. */
typedef struct llm_writer llm_writer;
llm_writer *llm_writer_create(const char *path, llm_error *err);
bool llm_writer_value(llm_writer *w, const llm_value *value); /* copied as it is */
bool llm_writer_u32(llm_writer *w, const char *key, uint32_t x);
bool llm_writer_f32(llm_writer *w, const char *key, float x);
bool llm_writer_bool(llm_writer *w, const char *key, bool x);
bool llm_writer_string(llm_writer *w, const char *key, const char *x);
bool llm_writer_string_array(llm_writer *w, const char *key, const llm_string *x, uint64_t n);
bool llm_writer_i32_array(llm_writer *w, const char *key, const int32_t *x, uint64_t n);
bool llm_writer_f32_array(llm_writer *w, const char *key, const float *x, uint64_t n);
bool llm_writer_tensor(llm_writer *w, llm_string name, llm_type type, int n_dims,
                       const uint64_t *dims);
bool llm_writer_data(llm_writer *w, const void *data, size_t bytes); /* in pieces of any size */
/* End the file and free the writer. On failure, PATH is unchanged and PATH.tmp is removed. */
bool llm_writer_finish(llm_writer *w, llm_error *err);
void llm_writer_abandon(llm_writer *w);

/* Rewrite a model (a GGUF file, or a Hugging Face folder) as one GGUF file with its matrices as
 * `type`. One-dimensional tensors stay as they are. The token embedding and the output matrix
 * are more sensitive: they become q8_0 if `type` is q4_0, q4_1, q5_0 or q5_1, and q6_K if it is
 * q4_K or q5_K. progress may be NULL; it returns false to stop. A value that is not finite or is
 * too large for its new type is an error. After any error, no file is written.
 *
 * mixed: in a q4_K or q5_K file, half of the matrices that rounding affects most (attn_v, ffn_down)
 * also become q6_K; the embedding does not if there is an output matrix. Files called Q4_K_M and
 * Q5_K_M are like this. */
bool llm_quantize(const char *in_path, const char *out_path, llm_type type, bool mixed,
                  bool (*progress)(void *user, uint64_t bytes_done, uint64_t bytes_total),
                  void *user, llm_error *err);
/* The type for a matrix whose rows have `cols` values; output: it is the embedding or the output
 * matrix. A row must be whole blocks. If it is not, q4_K becomes q5_0, q5_K becomes q5_1 and q6_K
 * becomes q8_0; if it is not whole blocks of 32 either, the type is f16. */
llm_type llm_quantize_type(llm_type type, uint64_t cols, bool output);
/* The type that llm_quantize gives a tensor of `file`. */
llm_type llm_quantize_tensor_type(const llm_file *file, const llm_tensor *tensor, llm_type type,
                                  bool mixed);

#ifdef __cplusplus
}
#endif
#endif /* LLM_QUANTIZE_H */

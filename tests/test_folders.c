/* Hugging Face folders. Folders that are damaged, or use features that llm.h does not have, must be
 * refused with a clear error and without leaking memory. They are made from the tiny models
 * of tests/data/models. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "test_util.h"
#define LLM_IMPLEMENTATION
#include "llm.h"
#include "../models/quantize.c"

static char folder[200]; /* the copy of a model that the tests damage */

static void path_of(char path[400], const char *directory, const char *name) {
    snprintf(path, 400, "%s/%s", directory, name);
}

static void write_file(const char *name, const void *data, size_t n) {
    char path[400];
    path_of(path, folder, name);
    unlink(path);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, n, f) != n || fclose(f)) fail_msg("cannot write %s", path);
}

static const char *const files[] = {"config.json", "tokenizer.json", "model.safetensors",
                                    "model.safetensors.index.json",
                                    "model-00001-of-00002.safetensors",
                                    "model-00002-of-00002.safetensors", "generation_config.json",
                                    "tokenizer_config.json", "added_tokens.json", "tokenizer.model",
                                    "quantize_config.json"};

static void clear_folder(void) {
    char path[400];
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        path_of(path, folder, files[i]);
        unlink(path);
    }
}

/* Put a fresh copy of a model into the folder. */
static void copy_model(const char *model) {
    char from[400], source[300];
    clear_folder();
    snprintf(source, sizeof source, "tests/data/models/%s", model);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        path_of(from, source, files[i]);
        if (access(from, F_OK)) continue;
        bytes b = slurp(from);
        write_file(files[i], b.data, b.length);
        clear_bytes(&b);
    }
}

static int n_refused;

/* Loading the folder must fail with an error that contains `words`. */
static void check_refused(const char *what, const char *words) {
    long live = test_live;
    llm_error err;
    memset(&err, 0, sizeof err);
    llm_model *model = llm_model_load(folder, &err);
    if (model) fail_msg("accepted: %s", what);
    assert_true(err.status != LLM_OK && err.status != LLM_ERROR_MEMORY);
    if (!strstr(err.message, words))
        fail_msg("%s: expected \"%s\", got \"%s\"", what, words, err.message);
    if (!strstr(err.message, folder))
        fail_msg("%s: the error does not give the path: %s", what, err.message);
    if (strchr(err.message, '\n')) fail_msg("%s: more than one line: %s", what, err.message);
    assert_int_equal(test_live, live);
    assert_null(llm_model_load(folder, NULL));
    n_refused++;
}

static void check_accepted(const char *what) {
    llm_error err;
    llm_model *model = llm_model_load(folder, &err);
    if (!model) fail_msg("%s: %s", what, err.message);
    llm_model_free(model);
}

/* Replace the first `from` in a file by `to`. In a safetensors file, `from` is in the header, whose
 * length is updated. "" as `from` inserts before the closing brace of the header or the file. */
static void replace(const char *name, const char *from, const char *to) {
    char path[400];
    path_of(path, folder, name);
    bytes b = slurp(path), out = {0};
    bool tensors = strstr(name, ".safetensors") && !strstr(name, ".json");
    size_t begin = tensors ? 8 : 0, end = b.length, at;
    uint64_t header = 0;
    if (tensors) {
        memcpy(&header, b.data, 8);
        end = 8 + (size_t)header;
    }
    size_t n = strlen(from);
    if (!n) {
        for (at = end - 1; b.data[at] != '}';) at--;
    } else {
        for (at = begin; at + n <= end && memcmp(b.data + at, from, n); at++) {}
        if (at + n > end) fail_msg("%s has no %s", name, from);
    }
    header += strlen(to) - n;
    if (tensors) put_u64(&out, header);
    put(&out, b.data + begin, at - begin);
    put(&out, to, strlen(to));
    put(&out, b.data + at + n, b.length - at - n);
    write_file(name, out.data, out.length);
    clear_bytes(&b);
    clear_bytes(&out);
}

typedef struct damage {
    const char *model, *file, *from, *to, *words;
} damage;

static void test_damaged_settings(void **state) {
    (void)state;
    static const damage cases[] = {
        {"llama_mha", "config.json", "{", "[", "config.json, line"},
        {"llama_mha", "config.json", "\"model_type\"", "\"modeltype\"",
         "does not say its model_type"},
        {"llama_mha", "config.json", "\"llama\"", "\"gemma\"",
         "config.json's model_type \"gemma\" is not supported; supported: llama, mistral, mixtral, "
         "qwen2"},
        {"llama_mha", "config.json", "\"llama\"", "17", "does not say its model_type"},
        {"llama_mha", "config.json", "\"hidden_size\": 24", "\"hidden_size\": null",
         "does not say \"hidden_size\""},
        {"llama_mha", "config.json", "\"hidden_size\": 24", "\"hidden_size\": 0",
         "\"hidden_size\" in config.json is not a whole number"},
        {"llama_mha", "config.json", "\"hidden_size\": 24", "\"hidden_size\": -24",
         "\"hidden_size\" in config.json is not a whole number"},
        {"llama_mha", "config.json", "\"hidden_size\": 24", "\"hidden_size\": 24.5",
         "\"hidden_size\" in config.json is not a whole number"},
        {"llama_mha", "config.json", "\"hidden_size\": 24", "\"hidden_size\": \"24\"",
         "\"hidden_size\" in config.json is not a whole number"},
        {"llama_mha", "config.json", "\"hidden_size\": 24", "\"hidden_size\": 99999999999",
         "\"hidden_size\" in config.json is not a whole number"},
        {"llama_mha", "config.json", "\"hidden_size\": 24", "\"hidden_size\": 48", "is of shape"},
        {"llama_mha", "config.json", "\"hidden_size\": 24",
         "\"hidden_size\": 24, \"hidden_size\": 24", "occurs twice"},
        {"llama_mha", "config.json", "\"intermediate_size\": 20", "\"intermediate_size\": 21",
         "the tensor model.layers.0.mlp.gate_proj.weight is of shape (20, 24), but config.json "
         "asks for (21, 24)"},
        {"gptq_g32", "config.json", "\"num_key_value_heads\": 2", "\"num_key_value_heads\": 1",
         "the tensor model.layers.0.self_attn.k_proj.qweight is of shape (32, 64), but config.json "
         "asks for (16, 64)"},
        {"llama_mha", "config.json", "\"vocab_size\": 96", "\"vocab_size\": 97",
         "config.json says \"vocab_size\": 97, but model.embed_tokens.weight has 96 rows: correct "
         "it"},
        {"llama_mha", "config.json", "\"vocab_size\": 96", "\"vocab_size\": 95",
         "config.json says \"vocab_size\": 95, but model.embed_tokens.weight has 96 rows"},
        {"llama_mha", "config.json", "\"vocab_size\": 96", "\"vocab_size\": 96.5",
         "\"vocab_size\" in config.json is not a whole number"},
        {"llama_mha", "config.json", "\"eos_token_id\": 95", "\"eos_token_id\": -5",
         "config.json: \"eos_token_id\" is -5, which is not the id of one of the 96 tokens: "
         "correct it, or remove the key"},
        {"llama_mha", "config.json", "\"eos_token_id\": 95", "\"eos_token_id\": \"x\"",
         "\"eos_token_id\" is x, which is not the id of one of"},
        {"llama_mha", "config.json", "\"eos_token_id\": 95", "\"eos_token_id\": 1.5",
         "\"eos_token_id\" is 1.5, which is not"},
        {"llama_mha", "config.json", "\"eos_token_id\": 95", "\"eos_token_id\": 96",
         "\"eos_token_id\" is 96, which is not"},
        {"llama_mha", "config.json", "\"eos_token_id\": 95", "\"eos_token_id\": [95, 9999]",
         "\"eos_token_id\" is 9999, which is not"},
        {"llama_mha", "config.json", "\"eos_token_id\": 95", "\"eos_token_id\": [95, null]",
         "\"eos_token_id\" is null, which is not"},
        {"llama_mha", "config.json", "\"eos_token_id\": 95", "\"eos_token_id\": {\"a\": 1}",
         "\"eos_token_id\" is {...}, which is not"},
        {"llama_mha", "config.json", "\"bos_token_id\": null", "\"bos_token_id\": -1",
         "\"bos_token_id\" is -1, which is not the id of one of the 96 tokens"},
        {"llama_mha", "config.json", "\"bos_token_id\": null", "\"bos_token_id\": [1, 96]",
         "\"bos_token_id\" is 96, which is not"},
        {"llama_mha", "config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3",
         "the tensor model.layers.2.input_layernorm.weight is missing"},
        {"llama_mha", "config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1",
         "config.json's num_hidden_layers is 1, but there are more layers, with the tensor "
         "model.layers.1."},
        {"llama_mha", "config.json", "\"num_hidden_layers\": 2",
         "\"num_hidden_layers\": 2147483647", "config.json says 2147483647 layers"},
        {"llama_mha", "config.json", "\"num_attention_heads\": 2", "\"num_attention_heads\": 5",
         "is of shape"},
        {"llama_mha", "config.json", "\"num_attention_heads\": 2",
         "\"num_attention_heads\": 2147483647", "RoPE"},
        {"llama", "config.json", "\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3",
         "cannot share"},
        {"llama", "config.json", "\"head_dim\": 8", "\"head_dim\": 7", "RoPE over 7"},
        {"llama", "config.json", "\"head_dim\": 8", "\"head_dim\": 2000000000",
         "which is impossible"},
        {"llama", "config.json", "\"head_dim\": 8", "\"head_dim\": 16", "is of shape"},
        {"llama_mha", "config.json", "\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": -1",
         "\"rms_norm_eps\" in config.json is not a positive number"},
        {"llama_mha", "config.json", "\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1e999",
         "\"rms_norm_eps\" in config.json is not a positive number"},
        {"llama_mha", "config.json", "\"rope_theta\": 10000.0", "\"rope_theta\": 0",
         "\"rope_theta\" in config.json is not a positive number"},
        {"llama_mha", "config.json", "\"silu\"", "\"gelu\"",
         "the activation \"gelu\" is not supported; supported: silu"},
        {"llama_mha", "config.json", "\"pretraining_tp\"", "\"logit_soft_cap\"",
         "\"logit_soft_cap\": 1 in config.json is an option that is not supported"},
        {"llama_mha", "config.json", "\"pretraining_tp\": 1", "\"mystery\": {\"a\": 1}",
         "\"mystery\": {...} in config.json is an option"},
        {"llama_mha", "config.json", "\"pretraining_tp\": 1", "\"partial_rotary_factor\": 0.5",
         "partial_rotary_factor 0.5 is not supported"},
        {"llama_mha", "config.json", "\"pretraining_tp\": 1", "\"sliding_window\": 5",
         "not supported for llama"},
        {"llama_mha", "config.json", "\"rope_scaling\": null",
         "\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2}",
         "RoPE scaling \"dynamic\" is not supported; supported: default, linear, yarn, llama3"},
        {"llama_mha", "config.json", "\"rope_scaling\": null",
         "\"rope_scaling\": {\"rope_type\": \"ntk\"}", "RoPE scaling \"ntk\""},
        {"phi3_long", "config.json", "\"short_factor\": [", "\"short_factor\": [1, ",
         "\"short_factor\" in config.json is not a list of 3 numbers"},
        {"phi3_long", "config.json", "\"long_factor\": [", "\"long_factor\": 3, \"factors\": [",
         "\"factors\": [...] in the RoPE scaling of config.json"},
        {"phi3_long", "config.json", "1.25", "-1.25", "an entry that is not a positive number"},
        {"phi3_partial", "config.json", "\"partial_rotary_factor\": 0.5",
         "\"partial_rotary_factor\": 0.4", "RoPE over 3 dimensions"},
        {"phi3_partial", "config.json", "\"partial_rotary_factor\": 0.5",
         "\"partial_rotary_factor\": 1.5", "partial_rotary_factor 1.5 is not supported"},
        {"phi3", "config.json", "\"num_attention_heads\": 4", "\"num_attention_heads\": 6",
         "the tensor model.layers.0.self_attn.qkv_proj.weight is of shape"},
        {"granite", "config.json", "\"logits_scaling\": 2.5", "\"logits_scaling\": 0",
         "\"logits_scaling\" in config.json is not a positive number"},
        {"granite", "config.json", "\"logits_scaling\"", "\"final_logit_softcapping\"",
         "\"final_logit_softcapping\": 2.5 in config.json is an option that is not supported"},
        {"llama_mha", "config.json", "\"rope_scaling\": null", "\"residual_multiplier\": 0.5",
         "\"residual_multiplier\": 0.5 in config.json is an option that is not supported"},
        {"smollm3_list", "config.json", "\"no_rope_layers\": [", "\"no_rope_layers\": [1,",
         "no_rope_layers in config.json is not a list of 3 numbers"},
        {"smollm3_list", "config.json", "\"no_rope_layers\": [", "\"no_rope_layers\": [[], ",
         "no_rope_layers in config.json is not a list of 3 numbers"},
        {"gemma2", "config.json", "gelu_pytorch_tanh", "relu",
         "the activation \"relu\" is not supported; supported: gelu_pytorch_tanh"},
        {"gemma2", "config.json", "\"attn_logit_softcapping\": 2.0",
         "\"attn_logit_softcapping\": -2.0", "is not a positive number"},
        {"gemma3_linear", "config.json", "\"rope_type\": \"default\"",
         "\"rope_type\": \"yarn\"", "the RoPE of \"sliding_attention\" in config.json"},
        {"gemma3", "config.json", "gemma3_text", "gemma3", "model_type \"gemma3\" is not supported"},
        {"bloom", "config.json", "\"apply_residual_connection_post_layernorm\": false",
         "\"apply_residual_connection_post_layernorm\": true",
         "\"apply_residual_connection_post_layernorm\": true in config.json is an option"},
        {"bloom", "config.json", "\"num_attention_heads\": 4", "\"num_attention_heads\": 5",
         "has 72 rows, not 3 x 5 x 4"},
        {"bloom", "config.json", "\"n_layer\": 2,", "", "config.json does not say \"n_layer\""},
        {"mpt", "config.json", "\"alibi\": true", "\"alibi\": false",
         "\"alibi\": false in config.json is not supported"},
        {"mpt", "config.json", "\"clip_qkv\": null", "\"clip_qkv\": 8",
         "\"clip_qkv\": 8 in the attn_config of config.json is an option"},
        {"mpt", "config.json", "low_precision_layernorm", "low_precision_rmsnorm",
         "the norm_type \"low_precision_rmsnorm\""},
        {"mpt", "config.json", "multihead_attention", "multiquery_attention", "the attn_type"},
        {"gptneox", "config.json", "\"rotary_pct\": 0.5", "\"rotary_emb\": null",
         "config.json does not say \"rotary_pct\""},
        {"gptneox", "config.json", "\"gelu\"", "\"gelu_fast\"",
         "the activation \"gelu_fast\" is not supported; supported: gelu"},
        {"stablelm", "config.json", "\"qk_layernorm\": false", "\"qk_layernorm\": true",
         "\"qk_layernorm\": true in config.json is an option"},
        {"stablelm", "config.json", "\"use_parallel_residual\": false",
         "\"use_parallel_residual\": true",
         "the tensor model.layers.0.post_attention_layernorm.bias is unknown"},
        {"stablelm_parallel", "config.json", "\"use_parallel_residual\": true",
         "\"use_parallel_residual\": false",
         "the tensor model.layers.0.post_attention_layernorm.weight is missing"},
        {"olmo2", "config.json", "\"rope_theta\"", "\"sliding_window\": 4, \"rope_theta\"",
         "\"sliding_window\" in config.json is not supported for olmo2"},
        {"llama_mha", "config.json", "\"rope_scaling\": null", "\"rope_scaling\": {\"factor\": 2}",
         "does not say its rope_type"},
        {"llama_mha", "config.json", "\"rope_scaling\": null",
         "\"rope_scaling\": {\"type\": \"linear\"}", "does not say \"factor\""},
        {"llama_mha", "config.json", "\"rope_scaling\": null",
         "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 0}",
         "\"factor\" in config.json is not a positive number"},
        {"llama_mha", "config.json", "\"rope_scaling\": null",
         "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2, \"twist\": 1}",
         "\"twist\": 1 in the RoPE scaling"},
        {"llama_mha", "config.json", "\"rope_scaling\": null", "\"rope_scaling\": [1]",
         "the RoPE scaling in config.json is not an object"},
        {"qwen3_yarn", "config.json", "\"rope_type\": \"yarn\"",
         "\"rope_type\": \"yarn\", \"truncate\": false", "\"truncate\": false is not supported"},
        {"llama31", "config.json", "\"high_freq_factor\": 4.0", "\"high_freq_factor\": 0.5",
         "high_freq_factor in config.json is not above low_freq_factor"},
        {"llama31", "config.json", "\"low_freq_factor\": 1.0,", "",
         "does not say \"low_freq_factor\""},
        {"llama31", "config.json", "\"tie_word_embeddings\": true",
         "\"tie_word_embeddings\": false", "the tensor lm_head.weight is missing"},
        {"mistral_window", "config.json", "\"sliding_window\": 9", "\"sliding_window\": 0",
         "\"sliding_window\" in config.json is not a whole number"},
        {"mistral_window", "config.json", "\"num_key_value_heads\": 2",
         "\"num_key_value_heads\": null", "does not say \"num_key_value_heads\""},
        {"mistral_window", "config.json", "\"sliding_window\": 9",
         "\"sliding_window\": 9, \"layer_types\": [\"full_attention\"]", "not a list of 2 types"},
        {"mistral_window", "config.json", "\"sliding_window\": 9",
         "\"sliding_window\": 9, \"layer_types\": [\"full_attention\", \"chunked_attention\"]",
         "the layer type \"chunked_attention\""},
        {"qwen2_window", "config.json", "\"max_window_layers\": 1", "\"max_window_layers\": null",
         "from which layer on the window is used"},
        {"llama_bias", "config.json", "\"attention_bias\": true", "\"attention_bias\": false",
         "self_attn.k_proj.bias is unknown in the llama architecture"},
        {"llama_mha", "config.json", "\"attention_bias\": false", "\"attention_bias\": true",
         "self_attn.q_proj.bias is missing"},
        {"qwen3", "config.json", "\"qwen3\"", "\"qwen2\"", "is missing"},
        {"qwen2", "config.json", "\"qwen2\"", "\"llama\"", "is unknown in the llama architecture"},
        {"llama_mha", "tokenizer.json", "{", "", "tokenizer.json"},
        {"llama_mha", "tokenizer.json", "\"added_tokens\":[",
         "\"added_tokens\":[{\"id\":96,\"content\":\"[PAD]\",\"special\":true},",
         "tokenizer.json (with the files beside it) has 97 tokens, but the embedding "
         "(model.embed_tokens.weight) only 96 rows"},
        {"gptq_g32", "config.json", "\"bits\": 4", "\"bits\": 8",
         "the number of bits \"8\" is not supported; supported: 4"},
        {"gptq_g32", "config.json", "\"gptq\"", "\"bitsandbytes\"",
         "the quantization \"bitsandbytes\" is not supported; supported: gptq, awq"},
        {"gptq_g32", "config.json", "\"group_size\": 32", "\"group_size\": 48",
         "do not fit together in groups of 48"},
        {"gptq_g32", "config.json", "\"group_size\": 32", "\"group_size\": 64",
         "do not fit together in groups of 64"},
        {"gptq_g32", "config.json", "\"group_size\": 32", "\"group_size\": 0",
         "do not fit together in groups of 0"},
        {"gptq_g32", "config.json", "\"group_size\": 32", "\"group_size\": -9223372036854775808",
         "do not fit together"},
        {"gptq_g32", "config.json", "\"checkpoint_format\": \"gptq\"",
         "\"checkpoint_format\": \"marlin\"", "the gptq format \"marlin\" is not supported"},
        {"gptq_g32", "config.json", "\"checkpoint_format\": \"gptq\"", "\"format\": \"marlin\"",
         "the gptq format \"marlin\" is not supported"},
        {"gptq_g32", "config.json", "\"damp_percent\"", "\"rotation\"",
         "\"rotation\": 0.01 in the quantization_config"},
        {"gptq_g32", "config.json", "\"damp_percent\"",
         "\"dynamic\": {\"-:.*gate\": {}}, \"damp_percent\"",
         "\"dynamic\": {...} in the quantization_config"},
        {"gptq_g32", "config.json", "\"damp_percent\"",
         "\"is_marlin_format\": true, \"damp_percent\"", "\"is_marlin_format\": true in the"},
        {"gptq_g32", "config.json", "\"damp_percent\"", "\"data_type\": \"fp\", \"damp_percent\"",
         "the data_type \"fp\" is not supported"},
        {"gptq_g32", "config.json", "\"quant_method\"", "\"method\"",
         "the quantization_config in config.json does not say its quant_method"},
        {"llama_mha", "config.json", "\"hidden_act\"",
         "\"pruned_heads\": {\"0\": [1]}, \"hidden_act\"",
         "\"pruned_heads\": {...} in config.json"},
        {"awq_g32", "config.json", "\"gemm\"", "\"gemv\"",
         "the awq format \"gemv\" is not supported"},
        {"awq_g32", "config.json", "\"awq\"", "\"gptq\"",
         "the gptq format \"gemm\" is not supported"},
        {"awq_g32", "config.json", "\"quant_method\": \"awq\"",
         "\"quant_method\": \"gptq\", \"format\": \"gptq\"", "do not fit together"},
        {"gptq_g32", "config.json", "\"quantization_config\"", "\"_quantization_config\"",
         "q_proj.weight is missing"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        copy_model(cases[i].model);
        replace(cases[i].file, cases[i].from, cases[i].to);
        char what[300];
        snprintf(what, sizeof what, "%s: %s -> %s", cases[i].model, cases[i].from, cases[i].to);
        check_refused(what, cases[i].words);
    }
}

/* The tensor "<module>.<part>" of a safetensors file. */
static const llm_tensor *source_of(const llm_file *shard, const char *module, const char *part) {
    char name[160];
    snprintf(name, sizeof name, "%s.%s", module, part);
    for (int64_t i = 0; i < llm_file_n_tensors(shard); i++) {
        llm_string s = llm_file_tensor(shard, i)->name;
        if (s.length == strlen(name) && !memcmp(s.data, name, s.length))
            return llm_file_tensor(shard, i);
    }
    return NULL;
}

static void test_damaged_tensors(void **state) {
    (void)state;
    static const damage cases[] = {
        {"llama_mha", "", "{", "[", "line 1"},
        {"llama_mha", "", "\"F32\"", "\"F33\"", "is of the type 'F33', which is unknown"},
        {"llama_mha", "", "\"F32\"", "\"I32\"", "is of the type I32; supported: F32, F16, BF16"},
        {"llama_mha", "", "\"F32\"", "\"F16\"", "which is not their size"},
        {"llama_mha", "", "\"F32\"", "32", "is of the type '32', which is unknown"},
        {"llama_mha", "", "\"dtype\"", "\"type\"", "is of the type"},
        {"llama_mha", "", "\"shape\"", "\"form\"", "has no shape"},
        {"llama_mha", "", "\"shape\":[96,24]", "\"shape\":[24,96]", "is of shape"},
        {"llama_mha", "", "\"shape\":[96,24]", "\"shape\":[96,23]", "which is not their size"},
        {"llama_mha", "", "\"shape\":[96,24]", "\"shape\":[0,24]", "has an impossible shape"},
        {"llama_mha", "", "\"shape\":[96,24]", "\"shape\":[-96,-24]", "has an impossible shape"},
        {"llama_mha", "", "\"shape\":[96,24]",
         "\"shape\":[9223372036854775807,9223372036854775807]", "has an impossible shape"},
        {"llama_mha", "", "\"shape\":[96,24]", "\"shape\":[4611686018427387904,4]",
         "has an impossible shape"},
        {"llama_mha", "", "\"shape\":[96,24]", "\"shape\":[4611686018427387904,2]",
         "which is not their size"},
        {"llama_mha", "", "\"shape\":[96,24]", "\"shape\":[96.0,24]", "has an impossible shape"},
        {"llama_mha", "", "\"shape\":[96,24]", "\"shape\":[2304]",
         "has 1 dimensions, but should have 2"},
        {"llama_mha", "", "\"shape\":[96,24]", "\"shape\":[2,48,24]",
         "has 3 dimensions, but should have 2"},
        {"llama_mha", "", "\"shape\":[96,24]", "\"shape\":[1,96,24]",
         "has 3 dimensions, but should have 2"},
        {"llama_mha", "", "\"shape\":[24]", "\"shape\":[1,24]",
         "norm.weight has 2 dimensions, but should have 1"},
        {"llama_mha", "", "\"shape\":[20,24]", "\"shape\":[1,20,24]",
         "mlp.gate_proj.weight has 3 dimensions, but should have 2"},
        {"awq_g32", "", "\"F16\",\"shape\":[3,64]", "\"F16\",\"shape\":[1,3,64]",
         "is of type F16 with 3 dimensions, but should be F16 with 2"},
        {"llama_mha", "", "\"shape\":[96,24]", "\"shape\":[2,2,2,12,24]",
         "has no shape of up to 4 dimensions"},
        {"llama_mha", "", "\"shape\":[96,24]", "\"shape\":\"96x24\"", "has no shape"},
        {"llama_mha", "", "\"data_offsets\":[0,", "\"data_offsets\":[18446744073709551615,",
         "has no data_offsets of two numbers"},
        {"llama_mha", "", "\"data_offsets\":[0,", "\"data_offsets\":[9223372036854775807,",
         "has the data_offsets 9223372036854775807"},
        {"llama_mha", "", "\"data_offsets\":[0,", "\"data_offsets\":[4,",
         "which is not their size"},
        {"llama_mha", "", "\"data_offsets\":[0,", "\"data_offsets\":[-4,",
         "has no data_offsets of two numbers"},
        {"llama_mha", "", "\"data_offsets\":[0,", "\"data_offsets\":[",
         "has no data_offsets of two numbers"},
        {"llama_mha", "", "\"data_offsets\":[0,", "\"data_offsets\":[0,0,",
         "has no data_offsets of two numbers"},
        {"llama_mha", "", "\"data_offsets\":[0,9216]", "\"data_offsets\":[4,9220]", "overlap"},
        {"llama_mha", "", "\"data_offsets\":[0,9216]", "\"data_offsets\":[9216,18432]", "overlap"},
        {"llama_mha", "", "\"data_offsets\":[0,9216]", "\"data_offsets\":[9216,0]",
         "has the data_offsets 9216 to 0"},
        {"llama_mha", "", "\"data_offsets\":[0,9216]", "\"data_offsets\":[90000,99216]",
         "bytes of data: the file is damaged"},
        {"llama_mha", "", "\"data_offsets\"", "\"offsets\"", "has no data_offsets"},
        {"llama_mha", "", "lm_head.weight", "lm_headx.weight",
         "the tensor lm_head.weight is missing"},
        {"llama_mha", "", "model.norm.weight", "model.norm.weighs",
         "the tensor model.norm.weight is missing"},
        {"llama_mha", "", "model.embed_tokens.weight", "embed_tokens.weight",
         "the tensor model.embed_tokens.weight is missing"},
        {"llama_mha", "", "model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight",
         "model.layers.1.mlp.up_proj.weight is missing"},
        {"llama_mha", "", "model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight",
         "occurs twice"},
        {"llama_mha", "", "",
         ",\"model.extra\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}", "overlap"},
        {"llama_mha", "", "", ",\"model.extra\":7", "is of the type"},
        {"llama_mha", "", "", ",\"model.extra\":{}", "is of the type"},
        {"llama_mha", "", "",
         ",\"model.extra\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["
         "[[[[[[[[1",
         "more than 64"},
        {"llama_mha", "", "", ",", "a key in quotation marks"},
        {"gptq_g32", "", "model.layers.0.mlp.down_proj.qzeros",
         "model.layers.0.mlp.down_proj.qzeroes", "down_proj.qzeros is missing"},
        {"gptq_g32", "", "model.layers.0.mlp.down_proj.scales",
         "model.layers.0.mlp.down_proj.scale", "down_proj.scales is missing"},
        {"gptq_g32_act_sym", "", "model.layers.0.mlp.down_proj.g_idx",
         "model.layers.0.mlp.down_proj.g_idy", "down_proj.g_idx is missing"},
        {"awq_g32", "", "\"F16\",\"shape\":[3,64]", "\"BF16\",\"shape\":[3,64]",
         "but should be F16 with 2"},
        {"awq_g32", "", "\"F16\",\"shape\":[3,64]", "\"F16\",\"shape\":[6,32]",
         "do not fit together"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        copy_model(cases[i].model);
        replace("model.safetensors", cases[i].from, cases[i].to);
        char what[300];
        snprintf(what, sizeof what, "%s: %s -> %s", cases[i].model, cases[i].from, cases[i].to);
        check_refused(what, cases[i].words);
    }
    /* a group that does not exist */
    copy_model("gptq_g32_act_sym");
    char path[400];
    path_of(path, folder, "model.safetensors");
    bytes b = slurp(path);
    llm_error err;
    llm_file *shard = llm__file_create(b.data, b.length, LLM__BORROWED, "x", llm__read_safetensors,
                                       &err);
    int32_t bad = -1;
    memcpy((void *)(uintptr_t)source_of(shard, "model.layers.0.self_attn.q_proj", "g_idx")->data,
           &bad, sizeof bad);
    llm_file_close(shard);
    write_file("model.safetensors", b.data, b.length);
    clear_bytes(&b);
    check_refused("a negative group", "q_proj.g_idx names the group -1 of 2");
}

static void test_truncated_files(void **state) {
    (void)state;
    for (int i = 0; i < 40; i++) {
        copy_model("llama_mha");
        char path[400], what[100];
        path_of(path, folder, "model.safetensors");
        bytes b = slurp(path);
        size_t n = i < 12 ? (size_t)i : b.length * (size_t)(i - 11) / 30;
        if (n >= b.length) n = b.length - 1;
        write_file("model.safetensors", b.data, n);
        clear_bytes(&b);
        snprintf(what, sizeof what, "model.safetensors truncated to %d bytes", (int)n);
        check_refused(what, "model.safetensors");
    }
    for (int i = 0; i < 20; i++) {
        copy_model("llama_mha");
        const char *name = i % 2 ? "config.json" : "tokenizer.json";
        char path[400];
        path_of(path, folder, name);
        bytes b = slurp(path);
        write_file(name, b.data, b.length * (size_t)i / 21);
        clear_bytes(&b);
        check_refused("a truncated JSON file", name);
    }
    static const uint64_t lengths[] = {
        0, 1, 100000001, UINT64_MAX, UINT64_MAX - 7, (uint64_t)1 << 63, (uint64_t)1 << 32};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        copy_model("llama_mha");
        char path[400];
        path_of(path, folder, "model.safetensors");
        bytes b = slurp(path);
        memcpy(b.data, &lengths[i], 8);
        write_file("model.safetensors", b.data, b.length);
        clear_bytes(&b);
        check_refused("a wrong length of the header", "model.safetensors");
    }
}

/* A changed bit in the header or in config.json gives an error, or a model if the option is
 * ignored; never a crash or a leak. */
static void test_flipped_bytes(void **state) {
    test_random r = {7};
    int n_taken = 0;
    (void)state;
    for (int i = 0; i < 300; i++) {
        copy_model(i % 3 ? "llama_mha" : "gptq_g32_act_sym");
        const char *name = i % 2 ? "model.safetensors" : "config.json";
        char path[400];
        path_of(path, folder, name);
        bytes b = slurp(path);
        uint64_t header = b.length;
        if (i % 2) memcpy(&header, b.data, 8), header += 8;
        b.data[random_below(&r, (int)header)] ^= (uint8_t)(1 << random_below(&r, 8));
        write_file(name, b.data, b.length);
        clear_bytes(&b);
        long live = test_live;
        llm_error err = {.status = LLM_OK};
        llm_model *model = llm_model_load(folder, &err);
        n_taken += model != NULL;
        if (!model) assert_true(err.status != LLM_OK && err.message[0]);
        llm_model_free(model);
        assert_int_equal(test_live, live);
    }
    n_refused += 300 - n_taken;
    assert_true(n_taken < 150);
}

static void test_split_safetensors(void **state) {
    (void)state;
    static const char index[] = "model.safetensors.index.json";
    static const char second[] = "model-00002-of-00002.safetensors";
    char path[400];
    copy_model("llama");
    check_accepted("two files");
    path_of(path, folder, second);
    unlink(path);
    check_refused("a missing file", "cannot open");
    copy_model("llama");
    replace(index, "weight_map", "weights");
    check_refused("no weight_map", "has no weight_map");
    copy_model("llama");
    replace(index, second, "../llama/model-00002-of-00002.safetensors");
    check_refused("a file outside", "which is not the name of a file here");
    copy_model("llama");
    replace(index, second, "/etc/passwd");
    check_refused("a file outside", "which is not the name of a file here");
    copy_model("llama");
    replace(index, "\"model-00002-of-00002.safetensors\"", "2");
    check_refused("no name", "names no file for");
    copy_model("llama");
    replace(index, second, index); /* a cycle: the index names itself as a file with tensors */
    check_refused("the index as a file", "does not fit into a file");
    copy_model("llama");
    replace(index, second, ".");
    check_refused("the folder as a file", "it is a directory, not a file");
    copy_model("llama");
    replace(index, second, "model-00001-of-00002.safetensors");
    check_refused("the wrong file", "is not in the file that the index names for it");
    copy_model("llama");
    replace(index, "\"weight_map\": {",
            "\"weight_map\": {\"model.more\": \"model-00001-of-00002.safetensors\",");
    check_refused("a tensor that is not there", "is not in the file that the index names for it");
    copy_model("llama");
    unlink(path);
    if (symlink(second, path)) fail_msg("symlink");
    check_refused("a link to itself", "cannot open");
    copy_model("llama");
    unlink(path);
    if (symlink("model-00001-of-00002.safetensors", path)) fail_msg("symlink");
    check_refused("a file twice", "two of the files have a tensor called");
    static const char *const messages[6] = {
        "there is no config.json", "tokenizer.json", NULL,
        "there is neither model.safetensors nor", "cannot open", "cannot open"};
    for (size_t i = 0; i < 6; i++) { /* each of the files is missing in turn */
        if (!messages[i]) continue; /* model.safetensors: this model is split */
        copy_model("llama");
        path_of(path, folder, files[i]);
        unlink(path);
        check_refused(files[i], messages[i]);
    }
}

/* Folders as other programs write them: the reader accepts settings that do not change the
 * result. */
static void test_settings_without_effect(void **state) {
    (void)state;
    copy_model("llama_mha");
    replace("config.json", "\"hidden_act\"",
            "\"_name_or_path\": \"x\", \"unsloth_version\": \"2024.9\", \"new_option\": false, "
            "\"another\": null, \"hidden_act\"");
    check_accepted("settings that do not change the result");
    copy_model("llama_mha");
    replace("config.json", "\"hidden_act\"",
            "\"is_llama_config\": true, \"rope_interleaved\": false, \"hidden_act\"");
    check_accepted("SmolLM2's settings");
    copy_model("llama_mha");
    replace("config.json", "\"hidden_act\"",
            "\"max_length\": 4096, \"do_sample\": true, \"temperature\": 0.9, \"top_p\": 0.6, "
            "\"top_k\": 50, \"num_beams\": 1, \"task_specific_params\": {\"x\": 1}, "
            "\"pruned_heads\": {}, \"neftune_noise_alpha\": 5.0, \"bad_words\": [], "
            "\"hidden_act\"");
    check_accepted("settings of generation and training");
    copy_model("gptq_g32");
    replace("config.json", "\"damp_percent\"",
            "\"act_group_aware\": true, \"pack_impl\": \"cpu\", "
            "\"module_name_preceding_first_block\": [\"model.embed_tokens\"], "
            "\"disable_exllama\": true, \"method\": \"gptq\", \"dynamic\": {}, \"adapter\": null, "
            "\"damp_percent\"");
    check_accepted("settings that GPTQModel and transformers write");
    copy_model("gptq_g32");
    replace("config.json", "\"damp_percent\"",
            "\"autoround_version\": \"0.4.2\", \"iters\": 200, \"lr\": 0.005, "
            "\"minmax_lr\": 0.005, \"nsamples\": 128, \"seqlen\": 2048, \"batch_size\": 8, "
            "\"gradient_accumulate_steps\": 1, \"low_gpu_mem_usage\": true, \"amp\": true, "
            "\"data_type\": \"int\", \"enable_quanted_input\": true, "
            "\"enable_minmax_tuning\": true, \"scale_dtype\": \"torch.float16\", "
            "\"damp_percent\"");
    check_accepted("settings that AutoRound writes");
    copy_model("llama31"); /* the output is tied, but lm_head is stored too */
    char path[400];
    path_of(path, folder, "model.safetensors");
    bytes b = slurp(path);
    size_t n = 96 * 24 * 2;
    char member[200];
    uint64_t header;
    memcpy(&header, b.data, 8);
    uint64_t data = b.length - 8 - header;
    snprintf(
        member, sizeof member,
        ",\"lm_head.weight\":{\"dtype\":\"BF16\",\"shape\":[96,24],\"data_offsets\":[%llu,%llu]}",
        (unsigned long long)data, (unsigned long long)(data + n));
    for (size_t i = 0; i < n; i++) put_u8(&b, 1);
    write_file("model.safetensors", b.data, b.length);
    clear_bytes(&b);
    replace("model.safetensors", "", member);
    check_accepted("a tied output that is stored");
    llm_error err;
    llm_model *model = llm_model_load(folder, &err);
    assert_true(llm_model_config(model)->tied_output);
    llm_model_free(model);
    /* more rows of the embedding than tokens: vocab_size counts rows, ids count tokens */
    copy_model("llama_mha");
    replace("tokenizer.json",
            "{\"id\":95,\"content\":\"<|end|>\",\"single_word\":false,\"lstrip\":false,"
            "\"rstrip\":false,\"normalized\":false,\"special\":true}",
            "");
    replace("config.json", "\"eos_token_id\": 95", "\"eos_token_id\": 94");
    check_accepted("padded rows of the embedding");
    replace("config.json", "\"eos_token_id\": 94", "\"eos_token_id\": 95");
    check_refused("an end token in the padding",
                  "\"eos_token_id\" is 95, which is not the id of one of the 95 tokens");
    /* data at odd addresses: the header is one byte longer */
    copy_model("llama_mha");
    replace("model.safetensors", "", " ");
    check_accepted("data at odd addresses");
    llm_file *odd = llm_file_open(folder, &err);
    if (!odd) fail_msg("%s", err.message);
    for (int64_t i = 0; i < llm_file_n_tensors(odd); i++) { /* kernels need aligned numbers */
        const llm_tensor *t = llm_file_tensor(odd, i);
        assert_int_equal((uintptr_t)t->data % (uintptr_t)llm_type_find(t->type)->block_bytes, 0);
    }
    llm_file_close(odd);
    /* a folder with only a vocabulary */
    copy_model("llama_mha");
    path_of(path, folder, "config.json");
    unlink(path);
    path_of(path, folder, "model.safetensors");
    unlink(path);
    llm_file *file = llm_file_open(folder, &err);
    if (!file) fail_msg("%s", err.message);
    llm_tokenizer *t = llm_tokenizer_create(file, &err);
    if (!t) fail_msg("%s", err.message);
    assert_int_equal(llm_tokenizer_size(t), 96);
    llm_tokenizer_free(t);
    llm_file_close(file);
}

/* ---- Compared with llama.cpp's converter ----------------------------------------------------- */

/* Numbers are equal up to the rounding of an f32, texts are equal. */
static void check_same_value(const char *model, const llm_value *ours, const llm_value *theirs) {
    size_t at = 0, their_at = 0;
    llm_string a, b;
    double x, y;
    char key[100];
    snprintf(key, sizeof key, "%.*s", (int)theirs->key.length, theirs->key.data);
    if (!ours) fail_msg("%s: there is no %s", model, key);
    if (llm_value_string(theirs, &their_at, &b)) {
        if (!llm_value_string(ours, &at, &a) || llm__compare_strings(&a, &b))
            fail_msg("%s: %s is another text", model, key);
        return;
    }
    if (!llm_value_f64(ours, 0, &x) || !llm_value_f64(theirs, 0, &y) ||
        fabs(x - y) > 1e-6 * fabs(y))
        fail_msg("%s: %s is %g, not %g", model, key, x, y);
}

/* A folder of tests/data/models and the GGUF file that llama.cpp's converter made of it have the
 * same settings, and tensors with the same names and shapes. */
static void test_metadata_as_converter(void **state) {
    static const char *const models[] = {
        "llama",          "llama_bias", "llama_linear", "llama_mha",  "llama31", "mistral",
        "mistral_window", "qwen2",      "qwen2_window", "qwen2_yarn", "qwen3",   "qwen3_yarn"};
    (void)state;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        char path[300];
        llm_error err;
        snprintf(path, sizeof path, "tests/data/models/%s", models[i]);
        llm_file *ours = llm_file_open(path, &err);
        if (!ours) fail_msg("%s", err.message);
        snprintf(path, sizeof path, "tests/data/models/%s.gguf", models[i]);
        llm_file *theirs = llm_file_open(path, &err);
        if (!theirs) fail_msg("%s", err.message);
        size_t cursor = 0, compared = 0;
        llm_string architecture;
        assert_true(llm_value_string(llm_file_find(theirs, "general.architecture"), &cursor,
                                     &architecture));
        for (int64_t k = 0; k < llm_file_n_values(theirs); k++) {
            const llm_value *value = llm_file_value(theirs, k);
            char key[100];
            snprintf(key, sizeof key, "%.*s", (int)value->key.length, value->key.data);
            /* the converter does not multiply the context length by the factor of linear scaling */
            if (!strcmp(models[i], "llama_linear") && !strcmp(key, "llama.context_length"))
                continue;
            if (!strcmp(key, "llama.vocab_size") || !strcmp(key, "mistral.vocab_size")) continue;
            if (strncmp(key, architecture.data, architecture.length) &&
                strcmp(key, "general.architecture"))
                continue;
            check_same_value(models[i], llm_file_find(ours, key), value);
            compared++;
        }
        assert_true(compared >= 10);
        assert_int_equal(llm_file_n_tensors(ours), llm_file_n_tensors(theirs));
        for (int64_t k = 0; k < llm_file_n_tensors(theirs); k++) {
            const llm_tensor *b = llm_file_tensor(theirs, k);
            char name[100];
            snprintf(name, sizeof name, "%.*s", (int)b->name.length, b->name.data);
            const llm_tensor *a = llm_file_find_tensor(ours, name);
            if (!a || a->n_dims != b->n_dims || memcmp(a->dims, b->dims, sizeof a->dims))
                fail_msg("%s: %s is missing, or of another shape", models[i], name);
            if (strcmp(name, "rope_freqs.weight")) continue;
            for (uint64_t j = 0; j < a->dims[0]; j++) {
                double x = (double)((const float *)a->data)[j],
                       y = (double)((const float *)b->data)[j];
                if (fabs(x - y) > 1e-5 * y)
                    fail_msg("%s: divisor %d is %g, not %g", models[i], (int)j, x, y);
            }
        }
        llm_file_close(ours);
        llm_file_close(theirs);
    }
}

/* A folder rewritten as an f32 file has the same values as the converter's file. (For llama, this
 * permutes the rows of q and k and their biases.) */
static void test_values_as_converter(void **state) {
    static const char *const models[] = {"llama", "llama_bias", "mistral", "qwen2", "qwen3"};
    (void)state;
    char out[300], path[300];
    snprintf(out, sizeof out, "%s.gguf", folder);
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        llm_error err;
        snprintf(path, sizeof path, "tests/data/models/%s", models[i]);
        if (!llm_quantize(path, out, LLM_F32, false, NULL, NULL, &err)) fail_msg("%s", err.message);
        snprintf(path, sizeof path, "tests/data/models/%s.gguf", models[i]);
        llm_file *ours = llm_file_open(out, &err), *theirs = llm_file_open(path, &err);
        assert_true(ours && theirs);
        for (int64_t k = 0; k < llm_file_n_tensors(theirs); k++) {
            const llm_tensor *b = llm_file_tensor(theirs, k);
            char name[100];
            snprintf(name, sizeof name, "%.*s", (int)b->name.length, b->name.data);
            const llm_tensor *a = llm_file_find_tensor(ours, name);
            assert_non_null(a);
            size_t n = (size_t)(a->bytes / sizeof(float));
            float *values = (float *)malloc(n * sizeof *values);
            llm_type_find(b->type)->unpack(b->data, values, (int64_t)n);
            if (memcmp(values, a->data, n * sizeof *values))
                fail_msg("%s: the values of %s differ", models[i], name);
            free(values);
        }
        llm_file_close(ours);
        llm_file_close(theirs);
        unlink(out);
    }
}

/* Settings that the converter does not write, or that no test model has. */
static void test_settings_of_config_json(void **state) {
    static const struct {
        const char *model, *from, *to, *key;
        uint64_t index;
        double expected;
    } cases[] = {
        /* Qwen2 has a window from layer max_window_layers on */
        {"qwen2_window", "\"torch_dtype\"", "\"torch_dtype\"",
         "qwen2.attention.sliding_window_pattern", 0, 0},
        {"qwen2_window", "\"torch_dtype\"", "\"torch_dtype\"",
         "qwen2.attention.sliding_window_pattern", 1, 1},
        {"qwen2_window", "\"torch_dtype\"",
         "\"layer_types\": [\"sliding_attention\", \"full_attention\"], \"torch_dtype\"",
         "qwen2.attention.sliding_window_pattern", 0, 1},
        {"qwen2_window", "\"torch_dtype\"",
         "\"layer_types\": [\"sliding_attention\", \"full_attention\"], \"torch_dtype\"",
         "qwen2.attention.sliding_window_pattern", 1, 0},
        {"qwen2_window", "\"max_window_layers\": 1", "\"max_window_layers\": 0",
         "qwen2.attention.sliding_window", 0, 7},
        {"qwen2_window", "\"max_window_layers\": 1", "\"max_window_layers\": 2",
         "qwen2.attention.sliding_window", 0, -1},
        {"qwen2_window", "\"use_sliding_window\": true", "\"use_sliding_window\": false",
         "qwen2.attention.sliding_window", 0, -1},
        {"mistral_window", "\"sliding_window\": 9", "\"sliding_window\": null",
         "llama.attention.sliding_window", 0, -1},
        /* the default of transformers */
        {"mistral_window", "\"sliding_window\": 9,", "", "llama.attention.sliding_window", 0, 4096},
        /* linear scaling multiplies the context length */
        {"llama_linear", "\"hidden_act\"", "\"hidden_act\"", "llama.context_length", 0, 160},
        {"llama_mha", "\"rope_theta\": 10000.0,", "", "llama.rope.freq_base", 0, 10000},
        {"llama_mha", "\"rope_theta\": 10000.0",
         "\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 5e5}",
         "llama.rope.freq_base", 0, 5e5},
        {"llama_mha", "\"rms_norm_eps\": 1e-05,", "", "llama.attention.layer_norm_rms_epsilon", 0,
         1e-6},
        {"qwen3_yarn", "\"beta_fast\": 16.0", "\"beta_fast\": 8",
         "qwen3.rope.scaling.yarn_beta_fast", 0, 8},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double x;
        llm_error err;
        copy_model(cases[i].model);
        replace("config.json", cases[i].from, cases[i].to);
        llm_file *file = llm_file_open(folder, &err);
        if (!file) fail_msg("case %zu: %s", i, err.message);
        const llm_value *value = llm_file_find(file, cases[i].key);
        bool *flag = &(bool){false};
        if (!value) x = -1;
        else if (value->element_type == LLM_VALUE_BOOL)
            x = llm_value_bool(value, cases[i].index, flag) && *flag;
        else assert_true(llm_value_f64(value, cases[i].index, &x));
        if (fabs(x - cases[i].expected) > 1e-6 * fabs(cases[i].expected))
            fail_msg("case %zu, %s: %g, not %g", i, cases[i].key, x, cases[i].expected);
        llm_file_close(file);
    }
}

/* The ids in eos_token_id of generation_config.json and config.json, one or several, end an answer.
 * They need not be special tokens. */
static void test_end_ids(void **state) {
    static const struct {
        const char *generation;
        int32_t ends[4]; /* end ids in addition to that of config.json */
    } cases[] = {{"{\"eos_token_id\": 66}", {66, -1}},
                 {"{\"eos_token_id\": [66, 70, 95]}", {66, 70, -1}},
                 {"{\"eos_token_id\": []}", {-1}},
                 {"{\"eos_token_id\": null}", {-1}},
                 {"{\"bos_token_id\": 66}", {-1}}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        llm_error err;
        copy_model("llama_mha"); /* 95 is the end id in its config.json */
        write_file("generation_config.json", cases[i].generation, strlen(cases[i].generation));
        llm_file *file = llm_file_open(folder, &err);
        if (!file) fail_msg("%s", err.message);
        llm_tokenizer *t = llm_tokenizer_create(file, &err);
        if (!t) fail_msg("%s", err.message);
        for (int32_t id = 0; id < llm_tokenizer_size(t); id++) {
            bool expected = id == 95;
            for (int k = 0; cases[i].ends[k] >= 0; k++)
                expected = expected || cases[i].ends[k] == id;
            if (llm_tokenizer_is_end(t, id) != expected) fail_msg("case %zu: token %d", i, (int)id);
            if (id >= 66 && id <= 70) assert_false(llm_tokenizer_is_special(t, id));
        }
        uint64_t n_ends = 1; /* each end id is listed once */
        while (cases[i].ends[n_ends - 1] >= 0) n_ends++;
        assert_int_equal(llm_file_find(file, "tokenizer.llm.end_token_ids")->count, n_ends);
        llm_tokenizer_free(t);
        llm_file_close(file);
    }
    write_file("generation_config.json", "{\"eos_token_id\": [66, 9999]}", 28);
    check_refused(
        "an end token that is not there",
        "generation_config.json: \"eos_token_id\" is 9999, which is not the id of one of the 96 "
        "tokens");
}

/* If YaRN covers less than max_position_embeddings, the errors about the context mention it. */
static void test_context_note(void **state) {
    static const char note[] = "; config.json says 256, but its YaRN scaling gives only 64, for an "
                               "original_max_position_embeddings of 16";
    llm_error err;
    (void)state;
    copy_model("qwen3_yarn");
    llm_model *model = llm_model_load(folder, &err);
    assert_true(model && !*llm_model_context_note(model));
    llm_model_free(model);
    replace("config.json", "\"max_position_embeddings\": 64", "\"max_position_embeddings\": 256");
    model = llm_model_load(folder, &err);
    assert_non_null(model);
    assert_int_equal(llm_model_config(model)->context_length, 64);
    assert_string_equal(llm_model_context_note(model), note + 2);
    llm_engine_options o = llm_engine_defaults();
    o.context_length = 65;
    assert_null(llm_engine_create(model, &o, &err));
    assert_non_null(strstr(err.message, "supports 1 to 64 tokens"));
    assert_non_null(strstr(err.message, note));
    for (o.context_length = 60; o.context_length <= 64; o.context_length += 4) {
        int32_t ids[65] = {0};
        llm_engine *engine = llm_engine_create(model, &o, &err);
        llm_request r = llm_request_defaults();
        r.prompt = ids;
        r.n_prompt = 65;
        assert_non_null(engine);
        assert_false(llm_submit(engine, &r, NULL, &err));
        assert_int_equal(err.status, LLM_ERROR_CAPACITY);
        assert_int_equal(strstr(err.message, note) != NULL, o.context_length == 64);
        llm_engine_free(engine);
    }
    /* also in a file written from the folder */
    char out[300];
    snprintf(out, sizeof out, "%s.gguf", folder);
    llm_model_free(model);
    assert_true(llm_quantize(folder, out, LLM_F16, false, NULL, NULL, &err));
    model = llm_model_load(out, &err);
    assert_non_null(model);
    assert_string_equal(llm_model_context_note(model), note + 2);
    llm_model_free(model);
    unlink(out);
}

/* ---- 4-bit integers, computed by their formula ----------------------------------------------- */

typedef struct int4_model {
    const char *name;
    bool awq, zeros_less_one;
} int4_model;

static uint32_t word_at(const llm_tensor *source, uint64_t i) {
    uint32_t word;
    memcpy(&word, (const uint8_t *)source->data + 4 * i, sizeof word);
    return word;
}

/* scale x (q - zero) for row r and column c of a matrix, from the stored tensors. */
static float int4_value(const llm_file *sources, const char *module, const int4_model *m,
                        uint64_t r, uint64_t c) {
    /* the position in a word of each of AWQ's eight rows: a word holds rows 0 2 4 6 1 3 5 7 */
    static const int places[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    const llm_tensor *weights = source_of(sources, module, "qweight"),
                      *zeros = source_of(sources, module, "qzeros"),
                      *scales = source_of(sources, module, "scales"),
                      *groups = source_of(sources, module, "g_idx");
    uint64_t rows = scales->dims[0], cols = m->awq ? weights->dims[1] : 8 * weights->dims[1];
    uint64_t group = groups ? word_at(groups, c) : c / (cols / scales->dims[1]);
    uint32_t q = m->awq ? word_at(weights, c * (rows / 8) + r / 8) >> 4 * places[r % 8] & 15
                        : word_at(weights, c / 8 * rows + r) >> 4 * (c % 8) & 15;
    int place = m->awq ? places[r % 8] : (int)(r % 8);
    uint32_t zero = word_at(zeros, group * (rows / 8) + r / 8) >> 4 * place & 15;
    return llm__f16_to_f32(llm__read_u16((const uint8_t *)scales->data + 2 * (group * rows + r))) *
           (float)((int)q - (int)zero - m->zeros_less_one);
}

/* True if every zero point is 8, so that q4_0 can hold the matrix. */
static bool is_symmetric(const llm_file *sources, const char *module, const int4_model *m) {
    const llm_tensor *zeros = source_of(sources, module, "qzeros");
    for (uint64_t i = 0; i < zeros->dims[0] * zeros->dims[1] * 8; i++)
        if ((word_at(zeros, i / 8) >> 4 * (i % 8) & 15) + m->zeros_less_one != 8) return false;
    return true;
}

static void check_int4(const llm_file *file, const llm_file *sources, const char *module,
                       const char *tensor, const int4_model *m) {
    const llm_tensor *t = llm_file_find_tensor(file, tensor);
    llm_error err;
    assert_non_null(t);
    assert_int_equal(t->type, is_symmetric(sources, module, m) ? LLM_Q4_0 : LLM_Q4_Z);
    uint64_t cols = t->dims[0], rows = t->dims[1];
    uint8_t *packed = (uint8_t *)malloc((size_t)t->bytes);
    float *values = (float *)malloc((size_t)cols * sizeof *values);
    assert_true(packed && values && llm_tensor_rows(t, 0, rows, packed, &err));
    for (uint64_t r = 0; r < rows; r++) {
        llm_type_find(t->type)->unpack(packed + r * (t->bytes / rows), values, (int64_t)cols);
        for (uint64_t c = 0; c < cols; c++) {
            uint64_t column = t->columns ? (uint64_t)t->columns[c] : c;
            float expected = int4_value(sources, module, m, r, column);
            if (values[c] != expected)
                fail_msg("%s, %s: row %d, column %d is %g, not %g", m->name, tensor, (int)r,
                         (int)column, (double)values[c], (double)expected);
        }
    }
    free(packed);
    free(values);
}

/* Compare the same matrix in an f32 file made from the folder, where the columns are in their
 * natural order. */
static void check_rewritten_int4(const llm_file *file, const llm_file *sources,
                                 const char *module, const char *tensor, const int4_model *m) {
    const llm_tensor *t = llm_file_find_tensor(file, tensor);
    assert_true(t && t->type == LLM_F32);
    for (uint64_t i = 0; i < t->dims[0] * t->dims[1]; i++)
        if (((const float *)t->data)[i] !=
            int4_value(sources, module, m, i / t->dims[0], i % t->dims[0]))
            fail_msg("%s, %s: value %d of the rewritten file", m->name, tensor, (int)i);
}

static void test_int4_formula(void **state) {
    static const int4_model models[] = {
        {"awq_g32", true, false},       {"awq_g32_sym", true, false},
        {"awq_g128", true, false},      {"gptq_g32", false, true},
        {"gptq_g32_act", false, true},  {"gptq_g32_act_sym", false, true},
        {"gptq_g128_act", false, true}, {"gptq_g32_zero", false, true},
        {"gptq_v2", false, false}};
    static const char *const parts[][2] = {{"self_attn.q_proj", "attn_q"},
                                           {"self_attn.v_proj", "attn_v"},
                                           {"mlp.up_proj", "ffn_up"},
                                           {"mlp.down_proj", "ffn_down"}};
    (void)state;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        char path[300], out[300], module[100], tensor[100];
        llm_error err;
        snprintf(path, sizeof path, "tests/data/models/%s", models[i].name);
        llm_file *file = llm_file_open(path, &err);
        if (!file) fail_msg("%s", err.message);
        snprintf(out, sizeof out, "%s.gguf", folder);
        llm_file *rewritten = llm_quantize(path, out, LLM_F32, false, NULL, NULL, &err)
                                  ? llm_file_open(out, &err)
                                  : NULL;
        if (!rewritten) fail_msg("%s", err.message);
        snprintf(path, sizeof path, "tests/data/models/%s/model.safetensors", models[i].name);
        bytes b = slurp(path);
        llm_file *sources =
            llm__file_create(b.data, b.length, LLM__BORROWED, path, llm__read_safetensors, &err);
        assert_non_null(sources);
        for (int layer = 0;; layer++) {
            snprintf(tensor, sizeof tensor, "blk.%d.attn_q.weight", layer);
            if (!llm_file_find_tensor(file, tensor)) break;
            for (size_t k = 0; k < sizeof parts / sizeof *parts; k++) {
                snprintf(module, sizeof module, "model.layers.%d.%s", layer, parts[k][0]);
                snprintf(tensor, sizeof tensor, "blk.%d.%s.weight", layer, parts[k][1]);
                check_int4(file, sources, module, tensor, &models[i]);
                /* the rows of q are permuted (see test_values_as_converter) */
                if (strcmp(parts[k][1], "attn_q"))
                    check_rewritten_int4(rewritten, sources, module, tensor, &models[i]);
            }
        }
        llm_file_close(rewritten);
        unlink(out);
        llm_file_close(sources);
        clear_bytes(&b);
        llm_file_close(file);
    }
}

/* A 4-bit matrix whose scales are not all finite is detected and not rewritten. */
static void test_int4_not_finite(void **state) {
    static const char *const models[] = {"awq_g32", "gptq_g32", "gptq_g32_act_sym"};
    (void)state;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        char path[400], out[300];
        llm_error err;
        copy_model(models[i]);
        llm_file *file = llm_file_open(folder, &err);
        if (!file || !llm_file_check(file, &err)) fail_msg("%s: %s", models[i], err.message);
        llm_file_close(file);
        path_of(path, folder, "model.safetensors");
        bytes b = slurp(path);
        llm_file *shard =
            llm__file_create(b.data, b.length, LLM__BORROWED, path, llm__read_safetensors, &err);
        const llm_tensor *scales = source_of(shard, "model.layers.0.self_attn.v_proj", "scales");
        uint16_t bad = 0x7e00; /* NaN, in group 1, row 0 */
        memcpy((uint8_t *)(uintptr_t)scales->data + 2 * scales->dims[0], &bad, 2);
        llm_file_close(shard);
        write_file("model.safetensors", b.data, b.length);
        clear_bytes(&b);
        file = llm_file_open(folder, &err);
        assert_true(file && !llm_file_check(file, &err));
        static const char words[] = "the tensor model.layers.0.self_attn.v_proj.qweight has 32 "
                                    "values that are not finite, the first is nan at index 32";
        if (!strstr(err.message, words)) fail_msg("%s: %s", models[i], err.message);
        llm_file_close(file);
        snprintf(out, sizeof out, "%s.gguf", folder);
        assert_false(llm_quantize(folder, out, LLM_F32, false, NULL, NULL, &err));
        if (!strstr(err.message, words)) fail_msg("%s: %s", models[i], err.message);
        assert_true(access(out, F_OK) != 0);
    }
}

/* Giving one of the folder's files as the model must fail with an error that contains `words`. */
static void check_file_refused(const char *name, const char *words) {
    char path[400];
    llm_error err = {.status = LLM_OK};
    long live = test_live;
    path_of(path, folder, name);
    assert_null(llm_model_load(path, &err));
    if (!strstr(err.message, words))
        fail_msg("%s: expected \"%s\", got \"%s\"", name, words, err.message);
    assert_non_null(strstr(err.message, path));
    assert_int_equal(test_live, live);
}

/* Incomplete folders, and a file in place of its folder: the error says what to do. */
static void test_incomplete_folders(void **state) {
    static const char pointer[] =
        "version https://git-lfs.github.com/spec/v1\noid "
        "sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 9\n";
    static const char lfs[] =
        "a Git LFS pointer, not the file itself; get the file (git lfs pull)";
    char path[400];
    (void)state;
    copy_model("llama");
    check_file_refused("model-00001-of-00002.safetensors",
                 "a safetensors file is only a part of a model; give its folder");
    check_file_refused("config.json",
                 "this file is only a part of a model; give its folder");
    check_file_refused("model.safetensors.index.json",
                 "this file is only a part of a model; give its folder");
    write_file("tokenizer.json", pointer, sizeof pointer - 1);
    check_refused("a pointer instead of a tokenizer.json", lfs);
    check_file_refused("tokenizer.json", lfs);
    copy_model("llama_mha");
    write_file("model.safetensors", pointer, sizeof pointer - 1);
    check_refused("a pointer instead of a model.safetensors", lfs);
    copy_model("llama_mha");
    path_of(path, folder, "tokenizer.json");
    unlink(path);
    write_file("tokenizer.model", "x", 1);
    check_refused("only a tokenizer.model",
                  "without a tokenizer.json; there is a tokenizer.model, which "
                  "is not read: with Hugging Face's transformers, "
                  "AutoTokenizer.from_pretrained(FOLDER).save_pretrained("
                  "FOLDER) makes a tokenizer.json of it");
    /* quantized matrices without quantization settings, or where they are not supported */
    copy_model("gptq_g32");
    replace("config.json", "\"quantization_config\"", "\"_\"");
    check_refused("no quantization_config",
                  "q_proj.weight is missing; it is quantized, but config.json "
                  "has no quantization_config, which says how");
    write_file("quantize_config.json", "{\"bits\": 4}", 11);
    check_refused("only a quantize_config.json",
            "it is quantized, but config.json has no quantization_config: copy it from "
            "quantize_config.json");
    copy_model("gptq_g32");
    replace("model.safetensors", "lm_head.weight", "lm_head.qweight");
    check_refused("a quantized output",
                  "the tensor lm_head.weight is missing; it is quantized, which is "
                  "supported for the matrices of the layers only");
}

/* Tokens that are only in the files next to a tokenizer.json. The ids are those of transformers
 * 5.23. */
static void test_added_tokens(void **state) {
    (void)state;
#define ADDED(text, more)                                                          \
    "{\"content\": \"" text "\", \"single_word\": false, \"normalized\": false, "  \
    "\"special\": true" more "}"
    static const struct {
        const char *name, *content;
        int32_t ids[32]; /* the tokens of "ab <|x|> c", up to a -1 */
        const char *words; /* if set: the folder is refused with this message */
    } cases[] = {
        {"tokenizer_config.json", "{}", {66, 67, 1, 29, 93, 89, 93, 31, 1, 68, -1}, NULL},
        {"tokenizer_config.json",
         "{\"added_tokens_decoder\": {\"95\": " ADDED("<|end|>", "") ", \"96\": " ADDED(
             "<|x|>", "") "}, \"eos_token\": \"<|x|>\"}",
         {66, 67, 1, 96, 1, 68, -1},
         NULL},
        {"tokenizer_config.json",
         "{\"added_tokens_decoder\": {\"96\": " ADDED("<|x|>", ", \"lstrip\": true") "}}",
         {66, 67, 96, 1, 68, -1},
         NULL},
        {"tokenizer_config.json",
         "{\"added_tokens_decoder\": {\"96\": " ADDED("<|x|>", ", \"rstrip\": true") "}}",
         {66, 67, 1, 96, 68, -1},
         NULL},
        {"tokenizer_config.json",
         "{\"added_tokens_decoder\": {\"67\": " ADDED("a", ", \"rstrip\": true") "}}",
         {66, 67, 1, 29, 93, 89, 93, 31, 1, 68, -1},
         NULL},
        {"tokenizer_config.json",
         "{\"added_tokens_decoder\": {\"67\": " ADDED("b", ", \"rstrip\": true") "}}",
         {66, 67, 29, 93, 89, 93, 31, 1, 68, -1},
         NULL},
        {"added_tokens.json",
         "{\"<|y|>\": 97, \"<|x|>\": 96, \"<|end|>\": 95}",
         {66, 67, 1, 96, 1, 68, -1},
         NULL},
        {"tokenizer_config.json",
         "{\"added_tokens_decoder\": {\"99\": " ADDED("<|x|>", "") "}}",
         {0},
         "'<|x|>' in tokenizer_config.json has the id 99, but no token has the id 96"},
        {"tokenizer_config.json",
         "{\"added_tokens_decoder\": {\"66\": " ADDED("<|x|>", "") "}}",
         {0},
         "the tokens 'a' and '<|x|>' have the same id, 66"},
        {"tokenizer_config.json",
         "{\"added_tokens_decoder\": {\"x\": " ADDED("<|x|>", "") "}}",
         {0},
         "the token '<|x|>' has no id, or one that"},
        {"tokenizer_config.json",
         "{\"added_tokens_decoder\": {\"99999999999999999999\": " ADDED("<|x|>", "") "}}",
         {0},
         "the token '<|x|>' has no id, or one that"},
        {"tokenizer_config.json",
         "{\"added_tokens_decoder\": {\"96\": 7}}",
         {0},
         "an entry of added_tokens has no content"},
        {"added_tokens.json",
         "{\"<|y|>\": 97}",
         {0},
         "'<|y|>' in added_tokens.json has the id 97, but no token has the id 96"},
        {"added_tokens.json", "{\"<|y|>\": -1}", {0}, "the token '<|y|>' has no id, or one that"},
        {"added_tokens.json", "{\"<|y|>\": ", {0}, "added_tokens.json, line 1"},
        {"tokenizer_config.json",
         "{\"eos_token\": \"<|x|>\"}",
         {0},
         "the eos_token in tokenizer_config.json, '<|x|>', is not one of the tokens"},
        {"tokenizer_config.json",
         "{\"bos_token\": {\"content\": \"<|x|>\"}}",
         {0},
         "the bos_token in tokenizer_config.json, '<|x|>', is not one of the tokens"},
    };
#undef ADDED
    copy_model("llama_mha");
    char path[400];
    path_of(path, folder, "model.safetensors"); /* this test needs only the vocabulary */
    unlink(path);
    path_of(path, folder, "config.json");
    unlink(path);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        llm_error err;
        path_of(path, folder, "tokenizer_config.json");
        unlink(path);
        path_of(path, folder, "added_tokens.json");
        unlink(path);
        write_file(cases[i].name, cases[i].content, strlen(cases[i].content));
        if (cases[i].words) {
            check_refused(cases[i].content, cases[i].words);
            continue;
        }
        llm_file *file = llm_file_open(folder, &err);
        llm_tokenizer *t = file ? llm_tokenizer_create(file, &err) : NULL;
        if (!t) fail_msg("%s: %s", cases[i].content, err.message);
        int32_t ids[32];
        int64_t n = llm_tokenize(t, "ab <|x|> c", 10, LLM_TOKENIZE_SPECIAL, ids, 31, &err);
        assert_true(n > 0 && n < 32);
        ids[n] = -1;
        for (int64_t k = 0; k <= n; k++)
            if (ids[k] != cases[i].ids[k])
                fail_msg("%s: token %d is %d, not %d", cases[i].content, (int)k, (int)ids[k],
                         (int)cases[i].ids[k]);
        if (strstr(cases[i].content, "eos_token"))
            assert_true(llm_tokenizer_eos(t) == 96 && llm_tokenizer_is_end(t, 96));
        llm_tokenizer_free(t);
        llm_file_close(file);
    }
    /* Changed bits give an error or a vocabulary; never a crash or a leak. */
    test_random r = {9};
    for (int i = 0; i < 400; i++) {
        char text[400];
        int k = i % 4 + 1, n = snprintf(text, sizeof text, "%s", cases[k == 4 ? 6 : k].content);
        for (int flips = 1 + i % 2; flips; flips--)
            text[random_below(&r, n)] ^= (char)(1 << random_below(&r, 7));
        path_of(path, folder, "tokenizer_config.json");
        unlink(path);
        write_file(cases[k == 4 ? 6 : k].name, text, (size_t)n);
        long live = test_live;
        llm_error err = {.status = LLM_OK};
        llm_file *file = llm_file_open(folder, &err);
        llm_tokenizer *t = file ? llm_tokenizer_create(file, &err) : NULL;
        if (!t) assert_true(err.status != LLM_OK && err.message[0]);
        llm_tokenizer_free(t);
        llm_file_close(file);
        assert_int_equal(test_live, live);
    }
}

/* Each allocation fails once: nothing leaks, and a failure to load reports an error. */
static void test_failed_allocations(void **state) {
    static const char *const models[] = {"llama", "gptq_g32_act_sym"};
    (void)state;
    for (int m = 0; m < 2; m++) {
        copy_model(models[m]);
        write_file("added_tokens.json", "{\"<|end|>\": 95}", 15);
        long live = test_live;
        int failures = 0;
        for (int i = 0;; i++) {
            llm_error err = {.status = LLM_OK};
            test_fail_in = i;
            test_failed = false;
            llm_model *model = llm_model_load(folder, &err);
            test_fail_in = -1;
            bool failed = test_failed;
            llm_model_free(model);
            assert_int_equal(test_live, live);
            if (!failed) break;
            /* an optional step failed, such as testing whether a file exists */
            if (model) continue;
            failures++;
            assert_true(err.status != LLM_OK);
        }
        assert_true(failures > 30);
    }
}

/* ---- Engines on 4-bit weights, which are converted when they are loaded ---------------------- */

enum { N_GENERATED = 12 };

static llm_engine *new_engine(const llm_model *model, llm_backend *backend, llm_error *err) {
    llm_engine_options o = llm_engine_defaults();
    o.backend = backend;
    o.context_length = 32;
    o.max_sequences = 1;
    o.max_batch_tokens = 8;
    return llm_engine_create(model, &o, err);
}

static void submit_request(llm_engine *engine) {
    static const int32_t prompt[] = {5, 7, 11, 13, 2, 3, 17, 19, 23, 31};
    llm_error err;
    llm_request r = llm_request_defaults();
    r.prompt = prompt;
    r.n_prompt = sizeof prompt / sizeof *prompt;
    r.max_tokens = N_GENERATED;
    r.ignore_end = true;
    if (!llm_submit(engine, &r, NULL, &err)) fail_msg("%s", err.message);
}

/* Run a step and append its events. Returns false when the engine is done. */
static bool collect_events(llm_engine *engine, llm_event *events, int *n) {
    llm_error err;
    int more = llm_step(engine, &err);
    if (more < 0) fail_msg("%s", err.message);
    while (llm_next_event(engine, &events[*n])) *n += events[*n].token >= 0;
    assert_true(*n <= N_GENERATED);
    return more > 0;
}

/* Two engines use one model at the same time. The one whose backend packs weights keeps no
 * converted rows; the other keeps those of every matrix of a layer. Both generate the same tokens,
 * and a later engine is not affected by the first two. */
static void test_engines_on_one_model(void **state) {
    static const char *const models[] = {"gptq_g32_act_sym", "awq_g32", "gptq_v2", "llama"};
    (void)state;
    for (int m = 0; m < 4; m++) {
        copy_model(models[m]);
        long live = test_live;
        llm_error err;
        llm_model *model = llm_model_load(folder, &err);
        if (!model) fail_msg("%s", err.message);
        int matrices = m < 3 ? 7 * llm_model_config(model)->n_layers : 0;
        for (int round = 0; round < 2; round++) {
            llm_backend *packs = llm_cpu_backend(1, LLM_ISA_BEST, &err);
            llm_backend *points = llm_cpu_backend(1, LLM_ISA_BEST, &err);
            llm_event events[2][N_GENERATED + 1];
            int n[2] = {0, 0};
            llm_cpu_pack_weights(points, false);
            llm_engine *one = new_engine(model, packs, &err);
            llm_engine *other = new_engine(model, points, &err);
            if (!one || !other) fail_msg("%s", err.message);
            assert_int_equal(one->network.n_rows, 0);
            assert_int_equal(other->network.n_rows, matrices);
            for (int i = 0; matrices && i < llm_model_config(model)->n_layers * LLM__N_PARTS; i++)
                /* the rows that were packed are released */
                if (one->network.parts[i].packed) assert_null(one->network.parts[i].data);
            submit_request(one);
            submit_request(other);
            for (bool more = true; more;) {
                more = collect_events(one, events[0], &n[0]);
                more = collect_events(other, events[1], &n[1]) || more;
            }
            assert_true(n[0] == N_GENERATED && n[1] == N_GENERATED);
            for (int i = 0; i < N_GENERATED; i++) {
                assert_int_equal(events[0][i].token, events[1][i].token);
                assert_true(events[0][i].logprob == events[1][i].logprob);
            }
            llm_engine_free(one);
            assert_int_equal(((llm__cpu *)packs->context)->n_slabs, 0);
            llm_backend_free(packs);
            llm_engine_free(other);
            llm_backend_free(points);
        }
        llm_model_free(model);
        assert_int_equal(test_live, live);
    }
}

/* Each allocation fails once while an engine is created or a file is rewritten: the error is
 * reported and nothing leaks. */
static void test_failed_allocations_of_engines(void **state) {
    char path[400];
    (void)state;
    copy_model("gptq_g32_act_sym");
    path_of(path, folder, "generation_config.json"); /* a name that clear_folder removes */
    for (int kind = 0; kind < 3; kind++) {
        llm_error err;
        llm_model *model = llm_model_load(folder, &err);
        if (!model) fail_msg("%s", err.message);
        long live = test_live;
        int failures = 0, of_rows = 0;
        for (int i = 0;; i++) {
            err.status = LLM_OK;
            llm_backend *backend = llm_cpu_backend(1, LLM_ISA_BEST, NULL);
            llm_engine *engine = NULL;
            llm_cpu_pack_weights(backend, kind == 0);
            test_fail_in = i;
            test_failed = false;
            bool good = kind == 2 ? llm_quantize(folder, path, LLM_Q8_0, false, NULL, NULL, &err)
                                  : (engine = new_engine(model, backend, &err)) != NULL;
            test_fail_in = -1;
            bool failed = test_failed;
            llm_engine_free(engine);
            llm_backend_free(backend);
            assert_int_equal(test_live, live);
            if (!failed) break;
            if (good) continue; /* an optional step failed */
            failures++;
            of_rows +=
                err.status == LLM_ERROR_MEMORY && strstr(err.message, " for model.layers.") != NULL;
            /* kind 2 opens the folder again, and may not find a file (see above) */
            if (err.status == LLM_OK || (kind < 2 && err.status != LLM_ERROR_MEMORY))
                fail_msg("allocation %d: error %d: %s", i, (int)err.status, err.message);
        }
        llm_model_free(model);
        assert_int_equal(of_rows, 14); /* seven matrices in each of two layers */
        assert_true(failures > 14);
        unlink(path);
    }
}

/* A sparse file of 14 GB opens quickly, since it is mapped and not read. */
static void test_large_file_is_mapped(void **state) {
    (void)state;
    enum { LAYERS = 32, DIM = 4096, HIDDEN = 14336, KV = 1024, VOCABULARY = 96 };
    static const struct {
        const char *name;
        uint64_t rows, cols;
    } parts[] = {{"input_layernorm", 0, DIM},    {"self_attn.q_proj", DIM, DIM},
                 {"self_attn.k_proj", KV, DIM},  {"self_attn.v_proj", KV, DIM},
                 {"self_attn.o_proj", DIM, DIM}, {"post_attention_layernorm", 0, DIM},
                 {"mlp.gate_proj", HIDDEN, DIM}, {"mlp.up_proj", HIDDEN, DIM},
                 {"mlp.down_proj", DIM, HIDDEN}};
    copy_model("llama_mha");
    char path[400], line[300], config[600];
    path_of(path, folder, "model.safetensors");
    bytes header = {0};
    uint64_t at = 0;
    put(&header, "{\"__metadata__\":{\"format\":\"pt\"}", 31);
    for (int i = 0; i < LAYERS * 9 + 3; i++) {
        bool layer = i < LAYERS * 9;
        uint64_t cols = layer ? parts[i % 9].cols : DIM;
        static const char *const ends[] = {"model.embed_tokens", "model.norm", "lm_head"};
        char name[100], shape[50];
        if (layer) snprintf(name, sizeof name, "model.layers.%d.%s", i / 9, parts[i % 9].name);
        else snprintf(name, sizeof name, "%s", ends[i - LAYERS * 9]);
        uint64_t rows = VOCABULARY;
        if (layer) rows = parts[i % 9].rows;
        else if (i - LAYERS * 9 == 1) rows = 0; /* a vector */
        if (rows)
            snprintf(shape, sizeof shape, "%llu,%llu", (unsigned long long)rows,
                     (unsigned long long)cols);
        else snprintf(shape, sizeof shape, "%llu", (unsigned long long)cols);
        uint64_t n = (rows ? rows : 1) * cols * 2;
        put(&header, line,
            (size_t)snprintf(
                line, sizeof line,
                ",\"%s.weight\":{\"dtype\":\"BF16\",\"shape\":[%s],\"data_offsets\":[%llu,%llu]}",
                name, shape, (unsigned long long)at, (unsigned long long)(at + n)));
        at += n;
    }
    put(&header, "}", 1);
    while (header.length % 8) put(&header, " ", 1);
    bytes b = {0};
    put_u64(&b, header.length);
    put(&b, header.data, header.length);
    write_file("model.safetensors", b.data, b.length);
    if (truncate(path, (off_t)(b.length + at))) skip(); /* a file system without sparse files */
    clear_bytes(&b);
    clear_bytes(&header);
    int n = snprintf(config, sizeof config,
                     "{\"model_type\":\"llama\",\"hidden_size\":%d,\"intermediate_size\":%d,"
                     "\"num_hidden_layers\":%d,\"num_attention_heads\":32,"
                     "\"num_key_value_heads\":8,\"max_position_embeddings\":8192,"
                     "\"vocab_size\":96,\"rope_theta\":500000.0}",
                     DIM, HIDDEN, LAYERS);
    write_file("config.json", config, (size_t)n);
    llm_error err;
    double start = computed_seconds();
    llm_model *model = llm_model_load(folder, &err);
    double seconds = computed_seconds() - start;
    if (!model) fail_msg("%s", err.message);
    print_message("%.1f GB opened in %.1f ms\n", (double)llm_file_size(llm_model_file(model)) / 1e9,
                  1e3 * seconds);
    assert_true(llm_file_size(llm_model_file(model)) > 13000000000u);
    assert_true(seconds < 2);
    llm_model_free(model);
    clear_folder();
}

static void test_number_of_refused_folders(void **state) {
    (void)state;
    print_message("%d damaged folders refused\n", n_refused);
    assert_true(n_refused >= 200);
}

static int make_folder(void **state) {
    const char *tmp = getenv("TMPDIR");
    (void)state;
    snprintf(folder, sizeof folder, "%s/llm-test-folder-XXXXXX", tmp ? tmp : "/tmp");
    return !mkdtemp(folder);
}

static int remove_folder(void **state) {
    (void)state;
    clear_folder();
    return rmdir(folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_damaged_settings),
        cmocka_unit_test(test_damaged_tensors),
        cmocka_unit_test(test_truncated_files),
        cmocka_unit_test(test_flipped_bytes),
        cmocka_unit_test(test_split_safetensors),
        cmocka_unit_test(test_settings_without_effect),
        cmocka_unit_test(test_metadata_as_converter),
        cmocka_unit_test(test_values_as_converter),
        cmocka_unit_test(test_settings_of_config_json),
        cmocka_unit_test(test_end_ids),
        cmocka_unit_test(test_context_note),
        cmocka_unit_test(test_int4_formula),
        cmocka_unit_test(test_int4_not_finite),
        cmocka_unit_test(test_incomplete_folders),
        cmocka_unit_test(test_added_tokens),
        cmocka_unit_test(test_failed_allocations),
        cmocka_unit_test(test_engines_on_one_model),
        cmocka_unit_test(test_failed_allocations_of_engines),
        cmocka_unit_test(test_large_file_is_mapped),
        cmocka_unit_test(test_number_of_refused_folders),
    };
    return cmocka_run_group_tests_name("folders", tests, make_folder, remove_folder);
}

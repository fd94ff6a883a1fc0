/* quantize_command.c - llm quantize: convert the weights of a model file to another type */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include "tools.h"

#include <strings.h>

static bool quantize_progress(void *user, uint64_t done, uint64_t total) {
    show_progress(user, total ? (double)done / (double)total : 1, "");
    return !stop_requested;
}

/* Accepts the names of types, "q4_K_M" (q4_K mixed with q6_K) and "q5_K_M" (q5_K with q6_K). */
static bool parse_quantized_type(const char *name, llm_type *type, bool *mixed) {
    size_t length = strlen(name);
    *mixed = !strcasecmp(name, "q4_K_M") || !strcasecmp(name, "q5_K_M");
    const llm_type_info *found =
        *mixed ? llm_type_by_name((char[8]){name[0], name[1], '_', 'K'}) : llm_type_by_name(name);
    if (found) *type = found->type;
    return found && length;
}

void put_other_types(const llm_file *file, llm_type type) {
    const llm_tensor *first = NULL;
    int block = llm_type_find(type)->block_values, others = 0;
    for (int64_t i = 0; i < llm_file_n_tensors(file); i++) {
        const llm_tensor *t = llm_file_tensor(file, i);
        if (t->n_dims < 2 || t->dims[0] % (uint64_t)block == 0) continue;
        if (!others++) first = t;
    }
    if (!others) return;
    put("note: %d of the matrices have rows that are not whole blocks of %d values, and are of "
        "another type:\n  ",
        others, block);
    put_foreign(first->name.data, first->name.length);
    put(", with rows of %llu, is %s%s\n", (unsigned long long)first->dims[0],
        llm_type_find(first->type)->name, others > 1 ? ", and so on (see llm info --tensors)" : "");
}

static void put_quantized(const llm_file *file, llm_type type) {
    for (int i = 0; llm_type_at(i); i++)
        if (sum_type(file, llm_type_at(i)).tensors)
            put_type_sum(llm_type_at(i)->name, sum_type(file, llm_type_at(i)));
    put_other_types(file, type);
}

static int command_quantize(const command *self, int argc, char **argv) {
    const char *name = "q4_0";
    const option options[] = {{0, "type", "TYPE", TEXT, &name, 0, 0,
                               "f32, f16, bf16, q8_0, q6_K, q5_K, q5_1, q5_0, q4_K, q4_1 or q4_0 "
                               "(default); or q4_K_M, q5_K_M"}};
    llm_type type;
    bool mixed;
    llm_error err;
    char what[] = "quantize";
    int status = parse(self, options, COUNT(options), &argc, argv, 2);
    if (status != PARSED) return status;
    const option wanted_type = {0, "type", "TYPE", TYPE, NULL, 0, 0, ""};
    if (!parse_quantized_type(name, &type, &mixed))
        return misuse(self, "--type needs %s, q4_K_M, q5_K_M, not '%s'", WANTED(&wanted_type),
                      name);
    if (argc < 2)
        return misuse(self, argc ? "the file to write is missing" : "the file to read is missing");
    if (!may_write(argv[1], argv[0])) return FAILED;
    bool good = llm_quantize(argv[0], argv[1], type, mixed, quantize_progress, what, &err);
    show_progress(what, -1, "");
    if (!good)
        return stop_requested ? fail("interrupted: %s was not written", argv[1]) : fail_with(&err);
    llm_file *before = llm_file_open(argv[0], &err),
             *after = before ? llm_file_open(argv[1], &err) : NULL;
    if (after) {
        double bytes = (double)llm_file_size(before);
        put_text(argv[1]);
        put(": %s, %s before (%.0f %%)\n", HUMAN(llm_file_size(after)), HUMAN(bytes),
            100 * (double)llm_file_size(after) / bytes);
        put_quantized(after, type);
    }
    good = after != NULL;
    llm_file_close(after);
    llm_file_close(before);
    return good ? 0 : fail_with(&err);
}

static const char quantize_notes[] =
    "Converts the matrices of a model file to another type. Vectors stay as they are. The\n"
    "embedding and the output matrix matter most, so they become q8_0 where the type is q4_0,\n"
    "q4_1, q5_0 or q5_1, and q6_K where it is q4_K or q5_K. q4_K_M and q5_K_M also keep half of\n"
    "attn_v and ffn_down as q6_K. A matrix whose rows are not whole blocks of 256 values becomes\n"
    "q5_0 instead of q4_K, q5_1 instead of q5_K, or q8_0 instead of q6_K. The file appears only\n"
    "when it is complete.\n"
    "\n"
    "Examples:\n"
    "  llm quantize model-f16.gguf model-q4_0.gguf --type q4_0\n"
    "  llm quantize model-f16.gguf model-q4_K_M.gguf --type q4_K_M\n"
    "  llm quantize model-f16.gguf model-q8_0.gguf --type q8_0\n";

const command quantize_command = {"quantize", "Convert a model's weights to another type.",
                                  "IN OUT --type TYPE", command_quantize, quantize_notes};

/* lessons.h - the lessons in the order of the course, and the command that finds them. Included by main.c. */
#include "lesson.h"
#include "01-memory.c"
#include "03-kv.c"
#include "04-attention.c"
#include "05-int4.c"
#include "06-prefill.c"
#include "02-roofline.c" /* measures with a function of 06 */
#include "07-batching.c"
#include "08-paged.c"
#include "09-prefix.c"
#include "10-speculation.c"
#include "11-ladder.c"
#include "12-kernel.c"
#include "13-tokens.c"
#include "14-sampling.c"
#include "15-cpu.c"
#include "16-program.c"

static const command lessons[] = {
    {"lesson memory", "Where the bytes go: weights, cache, activations; what fits.", "[options]", lesson_memory, memory_notes},
    {"lesson roofline", "Two limits of this machine; prefill and decode under them.", "[options]", lesson_roofline, roofline_notes},
    {"lesson program", "A model as a list of operations; which wait for bytes; fusions.", "[options]", lesson_program, program_notes},
    {"lesson kv", "A text with and without the cache of keys and values.", "[options]", lesson_kv, kv_notes},
    {"lesson attention", "One real head, tile by tile: the online softmax.", "[options]", lesson_attention, attention_notes},
    {"lesson int4", "Weights of four bits: one group, then the whole trade-off.", "[options]", lesson_int4, int4_notes},
    {"lesson prefill", "Time to the first token and per token, by length of prompt.", "[options]", lesson_prefill, prefill_notes},
    {"lesson batching", "The same requests: static, dynamic, continuous batching.", "[options]", lesson_batching, batching_notes},
    {"lesson paged", "Who owns which block of the cache, step by step.", "[options]", lesson_paged, paged_notes},
    {"lesson prefix", "Many questions behind one long instruction.", "[options]", lesson_prefix, prefix_notes},
    {"lesson speculation", "Guesses of a draft, accepted and rejected; when it pays.", "[options]", lesson_speculation, speculation_notes},
    {"lesson kernel", "What the threads of a GPU's kernel do to memory, counted.", "[options]", lesson_kernel, kernel_notes},
    {"lesson tokens", "How a word becomes tokens; how many tokens a text is.", "[options]", lesson_tokenizer, tokens_notes},
    {"lesson sampling", "From logits to a token: temperature, top-k, top-p, draws.", "[options]", lesson_sampling, sampling_notes},
    {"lesson cpu", "One matrix product on a CPU, from the plain loop to tiles.", "[options]", lesson_cpu, cpu_notes},
};

static void show_lessons(void) {
    put_text("Lessons, in the order of the course (the pages are in docs/):\n\n");
    for (int i = 0; i < COUNT(lessons); i++) put("  llm %-19s %s\n", lessons[i].name, lessons[i].summary);
    put_text("  llm ladder              All of it, one switch at a time, in one table.\n");
    put_text("\nEach computes what it shows while you wait. --png FILE also draws it, --json\n"
             "gives the data, -m FILE takes another model, and --help tells the rest.\n");
}

static int command_lesson(const command *self, int argc, char **argv) {
    if (argc == 0) return show_lessons(), 0;
    if (argv[0][0] == '-') {
        int status = parse(self, NULL, 0, &argc, argv, 0);
        return status == PARSED ? misuse(self, "the name of a lesson is missing") : status;
    }
    suggestion s = {argv[0], NULL, 0};
    for (int i = 0; i < COUNT(lessons); i++) {
        const char *name = lessons[i].name + sizeof "lesson";
        if (!strcmp(name, argv[0])) return lessons[i].run(&lessons[i], argc - 1, argv + 1);
        consider(&s, name);
    }
    if (s.best) return misuse(self, "no lesson is named '%s'; did you mean '%s'?", argv[0], s.best);
    return misuse(self, "no lesson is named '%s'", argv[0]);
}

static const char lesson_notes[] =
    "llm lesson lists the lessons; llm lesson NAME --help tells the options of one. docs/README.md is the course.\n"
    "\n"
    "Examples:\n"
    "  llm lesson\n"
    "  llm lesson kv --png kv.png\n";

/* lessons.c - llm lesson: the lessons, in the order of the course. */
#include "lesson.h"

static const command *const lessons[] = {
    &memory_lesson, &roofline_lesson, &program_lesson, &block_lesson, &kv_lesson,
    &attention_lesson, &weights_lesson, &int4_lesson, &prefill_lesson, &batching_lesson,
    &paged_lesson, &prefix_lesson, &speculation_lesson, &kernel_lesson, &step_lesson,
    &tokens_lesson, &sampling_lesson, &cpu_lesson, &serving_lesson,
};

static void show_lessons(void) {
    put_text("Lessons, in the order of the course (the pages are in docs/):\n\n");
    for (int i = 0; i < COUNT(lessons); i++)
        put("  llm %-19s %s\n", lessons[i]->name, lessons[i]->summary);
    put_text("  llm ladder              Everything in one table, one switch at a time.\n");
    put_text("\nEach lesson computes its numbers live. --svg FILE and --png FILE write the\n"
             "plots, --json prints the data, -m FILE chooses another model, and --help lists\n"
             "all options.\n");
}

static int command_lesson(const command *self, int argc, char **argv) {
    if (argc == 0) return show_lessons(), 0;
    if (argv[0][0] == '-') {
        int status = parse(self, NULL, 0, &argc, argv, 0);
        return status == PARSED ? misuse(self, "the name of a lesson is missing") : status;
    }
    suggestion s = {argv[0], NULL, 0};
    for (int i = 0; i < COUNT(lessons); i++) {
        const char *name = lessons[i]->name + sizeof "lesson";
        if (!strcmp(name, argv[0])) return lessons[i]->run(lessons[i], argc - 1, argv + 1);
        consider(&s, name);
    }
    if (s.best) return misuse(self, "no lesson is named '%s'; did you mean '%s'?", argv[0], s.best);
    return misuse(self, "no lesson is named '%s'", argv[0]);
}

static const char lesson_notes[] =
    "llm lesson lists the lessons, llm lesson NAME --help the options of one. The course is\n"
    "docs/README.md.\n"
    "\n"
    "Examples:\n"
    "  llm lesson\n"
    "  llm lesson kv --svg kv.svg\n";

const command lesson_command = {
    "lesson", "Teach one idea with live figures. Without a name: list them.",
    "[NAME] [options]", command_lesson, lesson_notes};

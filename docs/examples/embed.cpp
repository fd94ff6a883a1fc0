// embed.cpp - the same from C++, with streamed output. llm.h is compiled from a C file:
//     printf '#define LLM_IMPLEMENTATION\n#include "llm.h"\n' >llm.c
//     cc -O2 -fopenmp -I. -c llm.c
//     c++ -std=c++11 -I. docs/examples/embed.cpp llm.o -fopenmp -o embed -lm
//     ./embed models/tales-q4_0.gguf
#include "llm.h"
#include <iostream>
#include <memory>
#include <string>

int main(int argc, char **argv) {
    llm_error err;
    const char *path = argc > 1 ? argv[1] : "models/tales-q4_0.gguf";
    std::unique_ptr<llm_model, void (*)(llm_model *)> model(llm_model_load(path, &err),
                                                            llm_model_free);
    std::unique_ptr<llm_engine, void (*)(llm_engine *)> engine( // freed before the model
        model ? llm_engine_create(model.get(), nullptr, &err) : nullptr, llm_engine_free);
    llm_request request = llm_request_defaults();
    request.max_tokens = 50;
    const std::string prompt = argc > 2 ? argv[2] : "Once upon a time";
    if (engine && llm_submit_text(engine.get(), prompt.c_str(), &request, nullptr, &err))
        while (llm_step(engine.get(), &err) > 0)
            for (llm_event event; llm_next_event(engine.get(), &event);)
                std::cout.write(event.text, (std::streamsize)event.text_length) << std::flush;
    if (err.status != LLM_OK) std::cerr << err.message << "\n";
    return err.status != LLM_OK;
}

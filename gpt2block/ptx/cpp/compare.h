// Relations of setp and set, and how they join with a predicate. Used for integers and for floating-point numbers.
#pragma once
#include "machine.h"

Handler pick_float(Form& f);  // floats.cpp: the handler of an instruction on floating-point numbers, or null

namespace floats {

inline unsigned accepted(const Form& f) {  // the relations for which a comparison holds, or 0
    static const std::unordered_map<std::string, unsigned> all = {
        {"eq", 2}, {"ne", 5}, {"lt", 1}, {"le", 3}, {"gt", 4}, {"ge", 6}, {"num", 7},
        {"equ", 10}, {"neu", 13}, {"ltu", 9}, {"leu", 11}, {"gtu", 12}, {"geu", 14}, {"nan", 8}};
    for (const std::string& word : f.modifiers) {
        const auto found = all.find(word);
        if (found != all.end()) return found->second;
    }
    return 0;
}

enum Joined { ALONE, AND, OR, XOR };
inline int joined(const Form& f) { return f.has("and") ? AND : f.has("or") ? OR : f.has("xor") ? XOR : ALONE; }

inline Mask join(int how, Mask found, Mask other) {
    return how == AND ? found & other : how == OR ? found | other : how == XOR ? found ^ other : found;
}

}  // namespace floats

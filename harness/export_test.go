package harness

import "strings"

// FitsSchema gives the verdict of the schema check alone. It reports false for
// decided where the text is faulty by itself, or a whole number is written as
// 1.0 or 1e3, which JSON Schema allows and Parse does not.
func FitsSchema(data []byte) (fits, decided bool) {
	p := &problems{offsets: map[string]int64{}}
	tree, ok := parseTree(data, p)
	if !ok || len(p.list) > 0 {
		return false, false
	}
	checkSchema(rootSchema(), tree, false, p)
	for _, one := range p.list {
		if strings.Contains(one.Message, "written plainly") {
			return false, false
		}
	}
	return len(p.list) == 0, true
}

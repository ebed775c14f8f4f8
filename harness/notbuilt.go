package harness

// missing is one field whose feature is not there yet.
type missing struct {
	path, remedy string
	// used says that the file has it.
	used func(h *Harness) bool
}

// missingFeatures lists the fields that are refused because nothing would act
// on them. A feature that gets built loses its row.
var missingFeatures = []missing{
	given("$.harness.auth", "write none, account or api-key", func(h *Harness) bool { return h.Harness.Auth == "broker" }),
	given("$.fallback", "", func(h *Harness) bool { return len(h.Fallback) > 0 }),
	given("$.fallbackOn", "", func(h *Harness) bool { return len(h.FallbackOn) > 0 }),
	given("$.egress.brokers", "", func(h *Harness) bool { return len(h.Egress.Brokers) > 0 }),
}

func given(path, remedy string, used func(*Harness) bool) missing {
	return missing{path: path, remedy: remedy, used: used}
}

// workspace is the workspace, an empty one where there is none.
func (h *Harness) workspace() Workspace {
	if h.Workspace == nil {
		return Workspace{}
	}
	return *h.Workspace
}

// missingFeatures reports every use of a feature that is not there yet, also
// beside other problems of the same field.
func (c *checker) missingFeatures() {
	for _, feature := range missingFeatures {
		remedy := feature.remedy
		if remedy == "" {
			remedy = "remove it"
		}
		if feature.used(c.h) {
			c.add(feature.path, nil, "not built yet", remedy).notBuilt = true
		}
	}
}

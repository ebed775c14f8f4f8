package integration

import "strings"

// change is an edit of what Docker's POST /containers/create is sent, in the fields of
// Docker's API. A path is keys divided by blanks.
type change func(body map[string]any)

// set puts a value into the place of whatever is there.
func set(path string, value any) change {
	return func(body map[string]any) {
		o, key := owner(body, path)
		o[key] = value
	}
}

// unset leaves a field out.
func unset(path string) change {
	return func(body map[string]any) {
		o, key := owner(body, path)
		delete(o, key)
	}
}

// with adds to a list.
func with(path string, value any) change {
	return func(body map[string]any) {
		o, key := owner(body, path)
		list, _ := o[key].([]any)
		o[key] = append(list, value)
	}
}

// without takes the words that begin so from a list.
func without(path, prefix string) change {
	return entries(path, func(entry any) bool {
		word, ok := entry.(string)
		return !ok || !strings.HasPrefix(word, prefix)
	})
}

// remount changes a field of the bind on target.
func remount(target, field string, value any) change {
	return entries("HostConfig Mounts", func(entry any) bool {
		if m := entry.(map[string]any); m["Target"] == target {
			m[field] = value
		}
		return true
	})
}

func unmount(target string) change {
	return entries("HostConfig Mounts", func(entry any) bool { return entry.(map[string]any)["Target"] != target })
}

// ulimit sets both sides of a limit.
func ulimit(name string, n int) change {
	return entries("HostConfig Ulimits", func(entry any) bool {
		if l := entry.(map[string]any); l["Name"] == name {
			l["Hard"], l["Soft"] = n, n
		}
		return true
	})
}

// device is one in the words of HostConfig.Devices.
func device(host, inside string) map[string]any {
	return map[string]any{"PathOnHost": host, "PathInContainer": inside, "CgroupPermissions": "rwm"}
}

// entries looks at each entry of a list and leaves out those that are not kept.
func entries(path string, keep func(entry any) bool) change {
	return func(body map[string]any) {
		o, key := owner(body, path)
		list, _ := o[key].([]any)
		var kept []any
		for _, entry := range list {
			if keep(entry) {
				kept = append(kept, entry)
			}
		}
		o[key] = kept
	}
}

// owner is the object that has the path's last key; what is missing is made.
func owner(body map[string]any, path string) (map[string]any, string) {
	keys := strings.Fields(path)
	last := len(keys) - 1
	for _, key := range keys[:last] {
		inner, ok := body[key].(map[string]any)
		if !ok {
			inner = map[string]any{}
			body[key] = inner
		}
		body = inner
	}
	return body, keys[last]
}

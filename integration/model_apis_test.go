package integration

import (
	"encoding/json"
	"strings"
)

// apis are the forms that the agents speak, by how a request's path ends.
var apis = map[string]api{
	"/messages":              {readMessages, messagesWhole, messagesParts},
	"/responses":             {readResponses, responsesWhole, responsesParts},
	"/chat/completions":      {readChat, chatWhole, chatParts},
	":generateContent":       {readGemini, geminiWhole, geminiParts},
	":streamGenerateContent": {readGemini, geminiWhole, geminiParts},
}

// object is a JSON object of an answer.
type object = map[string]any

// texts is a message's content: a string, or a list whose parts have a text or, for a
// tool's result, a content of their own.
type texts string

func (t *texts) UnmarshalJSON(b []byte) error {
	var one string
	if json.Unmarshal(b, &one) == nil {
		*t = texts(one)
		return nil
	}
	var list []struct{ Text string }
	err := json.Unmarshal(b, &list)
	all := make([]string, len(list))
	for i, part := range list {
		all[i] = part.Text
	}
	*t = texts(strings.Join(all, "\n"))
	return err
}

func arguments(u use) string {
	b, err := json.Marshal(u.args)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// Anthropic's Messages.

func readMessages(body []byte) (t talk, err error) {
	var q struct {
		Stream   bool
		Messages []struct {
			Role    string
			Content json.RawMessage
		}
		Tools []struct {
			Name   string
			Schema json.RawMessage `json:"input_schema"`
		}
	}
	err = json.Unmarshal(body, &q)
	t.stream = q.Stream
	for _, o := range q.Tools {
		t.offered = append(t.offered, offer(o))
	}
	for _, m := range q.Messages {
		if m.Role != "user" {
			continue
		}
		var whole texts
		var list []struct {
			Type    string
			Text    string
			Content texts
		}
		if json.Unmarshal(m.Content, &list) != nil {
			_ = json.Unmarshal(m.Content, &whole)
			t.said(string(whole))
		}
		for _, part := range list {
			if part.Type == "tool_result" {
				t.gave(string(part.Content))
			} else {
				t.said(part.Text)
			}
		}
	}
	return t, err
}

func messagesWhole(t talk, u use) any {
	content, reason := object{"type": "text", "text": u.text}, "end_turn"
	if u.name != "" {
		content, reason = object{"type": "tool_use", "id": t.id(), "name": u.name, "input": u.args}, "tool_use"
	}
	return object{
		"id": "msg_1", "type": "message", "role": "assistant", "model": "stub", "content": []any{content},
		"stop_reason": reason, "stop_sequence": nil, "usage": object{"input_tokens": 1, "output_tokens": 1},
	}
}

func messagesParts(t talk, u use) []event {
	start := messagesWhole(t, u).(object)
	block, reason := start["content"].([]any)[0].(object), start["stop_reason"]
	start["content"], start["stop_reason"] = []any{}, nil
	delta := object{"type": "text_delta", "text": u.text}
	if u.name != "" {
		delta = object{"type": "input_json_delta", "partial_json": arguments(u)}
		block["input"] = object{}
	} else {
		block["text"] = ""
	}
	return []event{
		{"message_start", object{"type": "message_start", "message": start}},
		{"content_block_start", object{"type": "content_block_start", "index": 0, "content_block": block}},
		{"content_block_delta", object{"type": "content_block_delta", "index": 0, "delta": delta}},
		{"content_block_stop", object{"type": "content_block_stop", "index": 0}},
		{"message_delta", object{"type": "message_delta", "delta": object{"stop_reason": reason, "stop_sequence": nil}, "usage": object{"output_tokens": 1}}},
		{"message_stop", object{"type": "message_stop"}},
	}
}

// OpenAI's Responses.

func readResponses(body []byte) (t talk, err error) {
	var q struct {
		Stream bool
		Input  []struct {
			Type, Role string
			Content    texts
			Output     texts
		}
		Tools []struct {
			Name   string
			Schema json.RawMessage `json:"parameters"`
		}
	}
	err = json.Unmarshal(body, &q)
	t.stream = q.Stream
	for _, o := range q.Tools {
		t.offered = append(t.offered, offer(o))
	}
	for _, item := range q.Input {
		switch {
		case item.Type == "function_call_output":
			t.gave(string(item.Output))
		case item.Role == "user":
			t.said(string(item.Content))
		}
	}
	return t, err
}

func responsesItem(t talk, u use) object {
	if u.name != "" {
		return object{"type": "function_call", "id": "fc_" + t.id(), "call_id": t.id(), "name": u.name, "arguments": arguments(u), "status": "completed"}
	}
	return object{
		"type": "message", "id": "msg_" + t.id(), "role": "assistant", "status": "completed",
		"content": []any{object{"type": "output_text", "text": u.text, "annotations": []any{}}},
	}
}

func responsesWhole(t talk, u use) any {
	return object{
		"id": "resp_1", "object": "response", "model": "stub", "status": "completed", "output": []any{responsesItem(t, u)},
		"usage": object{
			"input_tokens": 1, "output_tokens": 1, "total_tokens": 2,
			"input_tokens_details": object{"cached_tokens": 0}, "output_tokens_details": object{"reasoning_tokens": 0},
		},
	}
}

func responsesParts(t talk, u use) []event {
	item := responsesItem(t, u)
	return []event{
		{"response.created", object{"type": "response.created", "response": object{"id": "resp_1"}}},
		{"response.output_item.added", object{"type": "response.output_item.added", "output_index": 0, "item": item}},
		{"response.output_item.done", object{"type": "response.output_item.done", "output_index": 0, "item": item}},
		{"response.completed", object{"type": "response.completed", "response": responsesWhole(t, u)}},
	}
}

// OpenAI's Chat Completions.

func readChat(body []byte) (t talk, err error) {
	var q struct {
		Stream   bool
		Messages []struct {
			Role    string
			Content texts
		}
		Tools []struct {
			Function struct {
				Name   string
				Schema json.RawMessage `json:"parameters"`
			}
		}
	}
	err = json.Unmarshal(body, &q)
	t.stream = q.Stream
	for _, o := range q.Tools {
		t.offered = append(t.offered, offer(o.Function))
	}
	for _, m := range q.Messages {
		switch m.Role {
		case "tool":
			t.gave(string(m.Content))
		case "user":
			t.said(string(m.Content))
		}
	}
	return t, err
}

func chatMessage(t talk, u use) (message object, reason string) {
	if u.name == "" {
		return object{"role": "assistant", "content": u.text}, "stop"
	}
	call := object{"index": 0, "id": t.id(), "type": "function", "function": object{"name": u.name, "arguments": arguments(u)}}
	return object{"role": "assistant", "content": nil, "tool_calls": []any{call}}, "tool_calls"
}

func chatAnswer(kind, place string, message object, reason any) object {
	return object{
		"id": "chat_1", "object": kind, "created": 1, "model": "stub",
		"choices": []any{object{"index": 0, place: message, "finish_reason": reason}},
		"usage":   object{"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
	}
}

func chatWhole(t talk, u use) any {
	message, reason := chatMessage(t, u)
	return chatAnswer("chat.completion", "message", message, reason)
}

func chatParts(t talk, u use) []event {
	message, reason := chatMessage(t, u)
	return []event{
		{"", chatAnswer("chat.completion.chunk", "delta", message, nil)},
		{"", chatAnswer("chat.completion.chunk", "delta", object{}, reason)},
		{"", "[DONE]"},
	}
}

// Gemini's generateContent.

func readGemini(body []byte) (t talk, err error) {
	var q struct {
		Contents []struct {
			Role  string
			Parts []struct {
				Text             string
				FunctionResponse *struct{ Response map[string]any }
			}
		}
		Tools []struct {
			FunctionDeclarations []struct {
				Name string
				// The one or the other, by the library's version.
				Parameters           json.RawMessage
				ParametersJSONSchema json.RawMessage
			}
		}
	}
	err = json.Unmarshal(body, &q)
	for _, list := range q.Tools {
		for _, f := range list.FunctionDeclarations {
			t.offered = append(t.offered, offer{f.Name, append(f.Parameters, f.ParametersJSONSchema...)})
		}
	}
	for _, c := range q.Contents {
		for _, part := range c.Parts {
			if part.FunctionResponse != nil {
				b, _ := json.Marshal(part.FunctionResponse.Response)
				t.gave(string(b))
			} else if c.Role == "user" {
				t.said(part.Text)
			}
		}
	}
	return t, err
}

func geminiWhole(t talk, u use) any {
	part := object{"text": u.text}
	if u.name != "" {
		part = object{"functionCall": object{"id": t.id(), "name": u.name, "args": u.args}}
	}
	return object{
		"candidates":    []any{object{"index": 0, "finishReason": "STOP", "content": object{"role": "model", "parts": []any{part}}}},
		"usageMetadata": object{"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2},
		"modelVersion":  "stub", "responseId": "r1",
	}
}

func geminiParts(t talk, u use) []event { return []event{{"", geminiWhole(t, u)}} }

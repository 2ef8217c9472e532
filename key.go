package ratelimit

import "strings"

// Key joins the parts of a key with colons, as in Key("org 7", "alice"), which is "org
// 7:alice". Different parts make different keys: a colon or a backslash within a part has a
// backslash before it, so that a user named "alice:admin" does not share the key of
// Key("alice", "admin").
func Key(part string, parts ...string) string {
	if len(parts) == 0 && !strings.ContainsAny(part, keySpecial) {
		return part
	}
	var b strings.Builder
	keyEscaper.WriteString(&b, part) // a strings.Builder takes all that it is given
	for _, p := range parts {
		b.WriteByte(':')
		keyEscaper.WriteString(&b, p)
	}
	return b.String()
}

const keySpecial = `:\`

var keyEscaper = strings.NewReplacer(`\`, `\\`, `:`, `\:`)

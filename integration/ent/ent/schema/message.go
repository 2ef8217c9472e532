// Package schema is what ent generates its code from.
package schema

import (
	"entgo.io/ent"
	"entgo.io/ent/schema/field"
)

// Message is a message that somebody sent.
type Message struct{ ent.Schema }

// Fields are the columns of its table.
func (Message) Fields() []ent.Field { return []ent.Field{field.String("sender")} }

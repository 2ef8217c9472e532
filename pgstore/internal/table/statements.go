package table

import (
	"embed"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// New reads the statements for the table in a schema; "" means the one on the search_path. If the
// server hears nothing from the client for the duration silence, it releases a transaction's locks.
func New(schema string, distributed bool, silence time.Duration) *Table {
	name := pgx.Identifier{conn.Table}
	if schema != "" {
		name = pgx.Identifier{schema, conn.Table}
	}
	level := pgx.Serializable
	if distributed {
		level = pgx.ReadCommitted
	}
	in := textsFor(name.Sanitize(), distributed)
	return &Table{
		Level: level, common: in("common"), maintenance: in("maintenance"), inflight: in("inflight"), kinds: kindsOf(in),
		name: name.Sanitize(), schema: schema, distributed: distributed, silence: silence,
	}
}

// Close gives the kept connection back. From then on the table keeps none.
func (t *Table) Close() { t.kept.close() }

// Each statement on the table is a file, which is sent as it is. Only %[1]s stands for the table's
// name, with the schema if there is one, and another %s in grant_part for the rows. Files in the
// folder plain are for tables of one server, and those in distributed for distributed tables. The
// Go function that makes a statement's arguments says what it does. Statements that do not name the
// table are Go constants.
//
// A grant with the suffix in_turn waits for its row; the other grants of plain tables pass over
// locked rows. (PostgreSQL reads a row again that changed during the wait.) Its transaction may
// have waited for a turn, so its clock is statement_timestamp.
//
//go:embed sql
var files embed.FS

// text returns the statement in a file, for the table with this name.
func text(file, table string) string {
	sql, err := files.ReadFile(file)
	if err != nil {
		panic("table: " + err.Error()) // it is embedded
	}
	return fmt.Sprintf(strings.TrimSpace(string(sql)), table)
}

// textsFor returns the function that reads the statements of a folder, for the table with this
// name.
func textsFor(table string, distributed bool) func(folder string) texts {
	form := "plain"
	if distributed {
		form = "distributed"
	}
	return func(folder string) texts {
		all := make(texts)
		for _, pattern := range []string{"sql/" + folder, "sql/" + form + "/" + folder} {
			names, _ := fs.Glob(files, pattern+"/*.sql") // it is well-formed
			for _, name := range names {
				all[strings.TrimSuffix(path.Base(name), ".sql")] = text(name, table)
			}
		}
		return all
	}
}

// kindsOf returns the statements of all kinds. in reads their folders.
func kindsOf(in func(folder string) texts) map[bucket.Kind]*kind {
	level, window, calendar, slots := in("bucket"), in("window"), in("calendar"), in("slots")
	return map[bucket.Kind]*kind{
		bucket.TokenBucket: {
			must: with(level["take_must"], bucketMust),
			take: with(level["take"], bucketTake), takeBare: with(level["take_bare"], bucketTake), takeLean: with(level["take_lean"], bucketLean), give: with(level["give"], bucketGive),
			grant: with(level["grant"], bucketGrant), grantInTurn: with(level["grant_in_turn"], bucketGrant),
			grantMany: with(level["grant_many"], bucketMany), parts: partTexts(level["grant_part"], bucketRow),
			prefetch: with(level["prefetch_many"], bucketPrefetch), prefetchInTurn: with(level["prefetch_many_in_turn"], bucketPrefetch),
		},
		bucket.FixedWindow: {
			must: with(window["take_must"], windowMust),
			take: with(window["take"], windowTake), give: with(window["give"], windowGive), parts: partTexts(window["grant_part"], windowRow),
			grant: with(window["grant"], bucketGrant), grantInTurn: with(window["grant_in_turn"], bucketGrant),
			grantMany: with(window["grant_many"], bucketMany),
			prefetch:  with(level["prefetch_many"], bucketPrefetch), prefetchInTurn: with(level["prefetch_many_in_turn"], bucketPrefetch),
		},
		bucket.CalendarWindow: {
			must: with(calendar["take_must"], calendarMust),
			take: with(calendar["take"], calendarTake), give: with(window["give"], windowGive), // a give counts no edges
			grant: with(calendar["grant"], calendarGrant), grantInTurn: with(calendar["grant_in_turn"], calendarGrant),
			prefetch: with(calendar["prefetch_many"], calendarPrefetch), prefetchInTurn: with(calendar["prefetch_many_in_turn"], calendarPrefetch),
		},
		bucket.SlidingWindow: {
			take:  with(slots["take"], slotsTake),
			grant: with(slots["grant"], slotsGrant), grantInTurn: with(slots["grant_in_turn"], slotsGrant),
			prefetch: with(slots["prefetch_many"], slotsPrefetch), prefetchInTurn: with(slots["prefetch_many_in_turn"], slotsPrefetch),
		},
	}
}

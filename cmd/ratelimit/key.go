package main

import (
	"net/netip"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

// keyFlags say how a door makes a key of its parts.
type keyFlags struct {
	address   bool
	addresses edge.AddressConfig
	hashed    bool
	place     int
	shape     bool
}

func keyCommand(o *options) *cobra.Command {
	var f keyFlags
	c := &cobra.Command{
		Use:   "key PART...",
		Short: "Print the key that httplimit or grpclimit makes, for an override, a pause or a reset",
		Long: `Print the key that httplimit and grpclimit make of what is known of a client: of several parts as Join
does, of an address as Addresses, of a secret as Hashed, and of one in a list as FirstOf. - is a line
of standard input, so that a secret is in no list of processes. No database is asked.

With --shape it says what a key looks like: "address", a network as "IPv4/32", "hash", "hexadecimal",
"empty" or "text", with colons between the shapes of its parts.`,
		Example: `  ratelimit key --address 192.0.2.1
  ratelimit key --address --place 1 2001:db8::1
  ratelimit key --hashed -
  ratelimit key --shape 1:192.0.2.1/32`,
		GroupID: operating,
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			parts := make([]string, len(args))
			for i, argument := range args {
				var err error
				if parts[i], err = keyPart(cmd, argument); err != nil {
					return err
				}
			}
			key, err := f.key(parts)
			if err != nil {
				return err
			}
			p := o.printer(cmd)
			if p.json {
				return p.object(struct {
					Key   string `json:"key"`
					Shape string `json:"shape"`
				}{key, edge.Shape(key)})
			}
			if f.shape {
				key = edge.Shape(key)
			}
			p.say("%s", visible.Text(key))
			return nil
		},
	}
	flags := c.Flags()
	flags.BoolVar(&f.address, "address", false, "a part that is an address is written as its network")
	flags.IntVar(&f.addresses.IPv4Bits, "ipv4-bits", 32, "how much of an IPv4 address is the key")
	flags.IntVar(&f.addresses.IPv6Bits, "ipv6-bits", 64, "how much of an IPv6 address is the key")
	flags.BoolVar(&f.hashed, "hashed", false, "hash it")
	flags.IntVar(&f.place, "place", -1, "its place in the list of FirstOf, counted from 0")
	flags.BoolVar(&f.shape, "shape", false, "say what the key looks like")
	return c
}

// keyPart reads a part as it was given; "-" is a line of standard input.
func keyPart(cmd *cobra.Command, argument string) (string, error) {
	if argument != "-" {
		return keyOf(argument)
	}
	_, text, err := readFile(cmd.InOrStdin(), argument)
	line := strings.TrimRight(string(text), "\r\n")
	switch {
	case err != nil:
		return "", err
	case line == "" || strings.Contains(line, "\n"):
		return "", bad("standard input must be one line")
	}
	return line, nil
}

// key makes the key of parts.
func (f *keyFlags) key(parts []string) (string, error) {
	if f.place < -1 {
		return "", bad("--place %d: must not be negative", f.place)
	}
	if f.address {
		addresses, err := edge.NewAddresses[any]("ratelimit", &f.addresses, nil)
		if err != nil {
			return "", badInput{err}
		}
		found := false
		for i, part := range parts {
			addr, err := netip.ParseAddr(part)
			if err != nil {
				continue
			}
			found = true
			if parts[i], err = addresses.KeyOf(addr); err != nil {
				return "", badInput{err}
			}
		}
		if !found {
			return "", bad("--address: no part is an address")
		}
	}
	key := parts[0]
	if len(parts) > 1 {
		key = ratelimit.Key(parts[0], parts[1:]...)
	}
	if f.hashed {
		key = edge.Hash(key)
	}
	if f.place >= 0 {
		key = edge.Place(f.place, key)
	}
	if len(key) > ratelimit.MaxKeyLength {
		return "", bad("the key has %d bytes, and at most %d can be stored: see --hashed", len(key), ratelimit.MaxKeyLength)
	}
	return key, nil
}
